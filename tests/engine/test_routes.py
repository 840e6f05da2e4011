"""One load of a real vLLM that comes from three media at once."""

from __future__ import annotations

from pathlib import Path

from tests.engine.actions import Action, Generate, ReadMetrics, ResetPrefixCache, Sleep
from tests.engine.harness import EngineRunner
from tests.engine.tiers import (
    cpu,
    deployment,
    hint,
    lmdb,
    loaded_bytes,
    nvme,
    options,
    prompt,
    same_answers,
)

BLOCK_BYTES = 32 * 2 * 2 * 2 * 32 * 4
"""Tokens, layers, keys and values, heads, dimensions, bytes: a block of the tiny model."""

WHOLE = prompt(1)
HOST_BLOCKS = 128
SSD_BLOCKS = 256


def ask(tokens: int, *tiers: str, only: bool = False) -> Generate:
    """Answer the beginning of one and the same prompt."""
    allowed = hint(*tiers) if only else None
    return Generate((WHOLE[:tokens],), max_tokens=8, kv_transfer_params=allowed)


def others(first: int, count: int) -> Action:
    """Prompts of 31 blocks each that drive out what was used longer ago."""
    return Generate(tuple(prompt(first + i) for i in range(count)), max_tokens=1)


def test_one_load_comes_from_host_memory_nvme_and_lmdb(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    tiers = [
        cpu(capacity=f"{HOST_BLOCKS * BLOCK_BYTES}B", eviction={"policy": "lru"}),
        nvme(
            tmp_path,
            capacity=f"{SSD_BLOCKS * BLOCK_BYTES * 3 // 2}B",
            eviction={"policy": "lru"},
        ),
        lmdb(tmp_path, capacity="256MiB"),
    ]
    settled = Sleep(1.0)
    run = run_engine(
        options(tiny_model, deployment(tmp_path, tiers)),
        # Ten blocks that only lmdb has room to keep, ...
        *(ask(340), settled, others(100, 20), settled, ResetPrefixCache()),
        # ... ten more that nvme keeps as well, and eleven that are in host memory.
        *(ask(660), settled, others(200, 5), settled, ResetPrefixCache()),
        *(ask(1000), settled, ResetPrefixCache()),
        *(ReadMetrics(), ask(1000), ReadMetrics(), ResetPrefixCache()),
        ask(1000, only=True),  # no tier may answer: computed
    )
    [second], [third], [loaded], [computed] = (run.generations[i] for i in (2, 4, 5, 6))
    print("cached tokens:", [o.num_cached_tokens for o in (second, third, loaded, computed)])
    assert [o.num_cached_tokens for o in (second, third, loaded, computed)] == [320, 640, 992, 0]

    before, after = run.readings[:2]
    moved = {tier: loaded_bytes(before, after, tier) for tier in ("cpu", "ssd", "pins")}
    print("bytes by tier, the last hop of all as cpu:", moved)
    assert moved == {
        "pins": 10 * BLOCK_BYTES,
        "ssd": 10 * BLOCK_BYTES,
        "cpu": 31 * BLOCK_BYTES,
    }
    jobs = {
        outcome: after.total("vllm:tiered_kv_jobs", kind="load", outcome=outcome)
        - before.total("vllm:tiered_kv_jobs", kind="load", outcome=outcome)
        for outcome in ("ok", "partial", "failed")
    }
    assert jobs == {"ok": 1, "partial": 0, "failed": 0}
    assert same_answers([loaded], [computed])
    assert same_answers([loaded], [third])
