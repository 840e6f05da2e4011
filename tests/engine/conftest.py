from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import EngineRunner, ServerRunner
from tiered_kv.testing import models


@pytest.fixture(scope="session")
def engine_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What vLLM caches, such as its findings about a model's class."""
    return tmp_path_factory.mktemp("engine-cache")


@pytest.fixture
def run_engine(tmp_path: Path, engine_cache: Path) -> EngineRunner:
    """Runs scenarios on a real vLLM in child processes."""
    return EngineRunner(tmp_path, engine_cache)


@pytest.fixture
def serve(tmp_path: Path, engine_cache: Path) -> ServerRunner:
    """Starts a real OpenAI server of vLLM in child processes."""
    return ServerRunner(tmp_path, engine_cache)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """A tiny Llama with seeded random weights in float32."""
    shape = models.TinyModel()
    return models.tiny(models.cache_folder() / f"tiny-{shape.digest}", shape)


@pytest.fixture(scope="session")
def tiny_hybrid_model() -> Path:
    """A tiny Gemma 3 with two KV groups."""
    shape = models.TinyModel(layers=4)
    return models.tiny_hybrid(models.cache_folder() / f"tiny-hybrid-{shape.digest}", shape)


@pytest.fixture(scope="session")
def smollm2_model() -> Path:
    """SmolLM2-135M-Instruct in bf16."""
    return models.smollm2()
