from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.disks import loop_disk
from tests.engine.actions import EngineRun
from tests.engine.commands import Result
from tests.engine.harness import EngineRunner, ServerRunner
from tests.engine.lives import Lives, ServerRun
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


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory, engine_cache: Path, tiny_model: Path) -> Lives:
    """The engines that share one store."""
    scratch = tmp_path_factory.mktemp("lives")
    return Lives(
        store=tmp_path_factory.mktemp("store"),
        cache=engine_cache,
        model=tiny_model,
        run_engine=EngineRunner(scratch, engine_cache),
        serve=ServerRunner(scratch, engine_cache),
    )


@pytest.fixture(scope="session")
def warmed(lives: Lives) -> Result:
    """See `Lives.warm`."""
    return lives.warm()


@pytest.fixture(scope="session")
def in_process(lives: Lives, warmed: Result) -> EngineRun:
    """See `Lives.in_process`."""
    assert warmed.status == 0, warmed.stderr
    return lives.in_process()


@pytest.fixture(scope="session")
def served(lives: Lives, in_process: EngineRun) -> ServerRun:
    """See `Lives.server`."""
    assert in_process.killed
    return lives.server()


@pytest.fixture(scope="session")
def separate(lives: Lives, served: ServerRun) -> EngineRun:
    """See `Lives.separate`."""
    assert not served.left
    return lives.separate()


@pytest.fixture(scope="session")
def troubled(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
    """See `Lives.troubled`."""
    if os.geteuid():
        pytest.skip("a disk of its own needs root")
    with loop_disk(tmp_path_factory.mktemp("disk"), 160) as disk:
        return lives.troubled(disk.folder)


@pytest.fixture(scope="session")
def last(
    lives: Lives, separate: EngineRun, tiny_hybrid_model: Path, smollm2_model: Path
) -> EngineRun:
    """See `Lives.last`."""
    assert separate.killed
    return lives.last(tiny_hybrid_model, smollm2_model)


@pytest.fixture(scope="session")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiers and the trace of `ranks` lie."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def ranks(lives: Lives, tiny_hybrid_model: Path, ranks_folder: Path) -> EngineRun:
    """See `Lives.ranks`."""
    return lives.ranks(tiny_hybrid_model, ranks_folder)
