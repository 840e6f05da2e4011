"""Deployments and prompts that the engine tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.engine.actions import EngineOptions, Metrics, Output

PLUGINS = Path(__file__).parent / "plugins"
HASH = {"prefix_caching_hash_algo": "sha256_cbor"}


def prompt(seed: int, length: int = 1000) -> tuple[int, ...]:
    """Token ids of a prompt that shares no block with those of other seeds."""
    return tuple((31 * i + 7 * seed + i * i * (seed + 1)) % 251 + 3 for i in range(length))


def deployment(folder: Path, tiers: Sequence[Mapping[str, Any]], **settings: Any) -> Path:
    """Write a deployment's YAML; blocks are single engine blocks unless `chunk` says otherwise, and
    what is found is loaded, though the tiny model may compute it faster."""
    file = folder / f"deployment-{len(list(folder.glob('deployment-*')))}.yaml"
    file.write_text(
        yaml.safe_dump({"chunk": 1, "recompute": {"gate": "off"}, **settings, "tiers": list(tiers)})
    )
    return file


def cpu(**settings: Any) -> dict[str, Any]:
    return {"name": "host", "type": "cpu", "capacity": "64MiB", **settings}


def nvme(folder: Path, **settings: Any) -> dict[str, Any]:
    path = str(folder / "ssd")
    return {"name": "ssd", "type": "nvme", "path": path, "capacity": "256MiB", **settings}


def lmdb(folder: Path, **settings: Any) -> dict[str, Any]:
    path = str(folder / "pins")
    return {"name": "pins", "type": "lmdb", "path": path, "capacity": "128MiB", **settings}


def faulty(folder: Path, **settings: Any) -> dict[str, Any]:
    plan = {"path": str(folder / "faulty"), "plan": str(plan_file(folder))}
    return {"name": "bad", "type": "faulty", "capacity": "256MiB", **plan, **settings}


def plan_file(folder: Path) -> Path:
    """Says what fails in `faulty(folder)`."""
    return folder / "faulty-plan.json"


def transfer_config(config: Path, **settings: Any) -> dict[str, Any]:
    """What the engine is given to load the connector."""
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"config": str(config)},
        **settings,
    }


def options(model: Path, config: Path, **settings: Any) -> EngineOptions:
    """An engine with the tiers of `config`."""
    extra = HASH | settings.pop("extra", {})
    return EngineOptions(model, kv_transfer_config=transfer_config(config), extra=extra, **settings)


def hint(*tiers: str) -> dict[str, Any]:
    """Let only these tiers answer a request."""
    return {"tiered_kv": {"tiers": list(tiers)}}


def loaded_bytes(before: Metrics, after: Metrics, tier: str) -> float:
    """Bytes that the hops out of a tier copied between two readings."""
    name = "vllm:tiered_kv_hop_bytes"
    labels = {"src": "cpu", "dst": "gpu"} if tier == "cpu" else {"tier": tier, "dst": "cpu"}
    return after.total(name, **labels) - before.total(name, **labels)


def same_answers(first: Sequence[Output], second: Sequence[Output]) -> bool:
    """Whether two runs gave the same tokens."""
    return [o.token_ids for o in first] == [o.token_ids for o in second]


def assert_equal(loaded: Sequence[Output], cold: Sequence[Output]) -> None:
    """The same tokens, and logprobs that differ by no more than rounding."""
    assert same_answers(loaded, cold)
    for one, other in zip(loaded, cold, strict=True):
        assert one.logprobs
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def cached(outputs: Sequence[Output]) -> list[int]:
    """Prompt tokens that were not computed, per answer."""
    return [output.num_cached_tokens for output in outputs]
