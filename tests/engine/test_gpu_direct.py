"""Blocks of a real vLLM go between its cache and the disk through KvikIO's device path.

The engine computes on the processor, and its staging in host memory stands for a device's: real
KvikIO, under a CUDA driver that this repository brings, takes it for device memory.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.engine.actions import Generate, ResetPrefixCache, Sleep
from tests.engine.harness import EngineRunner
from tests.engine.tiers import deployment, nvme, options, prompt, same_answers
from tests.fakes.cuda_driver import COPIES
from tests.fakes.kvikio_process import cufile_environment

DRIVER = Path(__file__).with_name("driver")
PROMPTS = (prompt(1), prompt(2, 700))
CACHED = [992, 672]
"""Prompt tokens in whole blocks of 32, the last token always computed."""

HOP_BYTES = "vllm:tiered_kv_hop_bytes"


def _copies(folder: Path) -> int:
    """Copies between host and device that the driver made in all processes of a run."""
    calls: Counter[str] = Counter()
    for file in folder.glob("*/calls.json"):
        calls.update(json.loads(file.read_text()))
    print("driver:", {name: count for name, count in sorted(calls.items()) if "Mem" in name})
    return sum(calls[name] for name in COPIES)


def test_blocks_of_vllm_go_through_the_device_path_and_come_back_after_a_restart(
    run_engine: EngineRunner, tiny_model: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path, [nvme(tmp_path, gpu_direct="on")])
    ask = Generate(PROMPTS, max_tokens=24, logprobs=True)
    copies: list[int] = []
    runs = []
    for turn in range(2):
        folder = tmp_path / f"driver-{turn}"
        folder.mkdir()
        run = run_engine(
            options(tiny_model, config),
            # Stores open behind the engine's start, and writes go on behind the answers.
            *(Sleep(2.0), ask, Sleep(2.0), ResetPrefixCache(), ask),
            env=cufile_environment() | {"FAKE_CUDA_DRIVER": str(folder)},
            pythonpath=(DRIVER,),
        )
        copies.append(_copies(folder))
        runs.append(run)
    first, second = runs
    cold = first.generations[0]
    for outputs in (first.generations[1], *second.generations):
        assert [o.num_cached_tokens for o in outputs] == CACHED
        assert same_answers(outputs, cold)
    hops = {
        name: [run.metrics.total(HOP_BYTES, src=src, dst=dst, tier="ssd") for run in runs]
        for name, src, dst in (
            ("gpu->ssd", "gpu", "nvme"),
            ("ssd->gpu", "nvme", "gpu"),
            ("cpu->ssd", "cpu", "nvme"),
            ("ssd->cpu", "nvme", "cpu"),
        )
    }
    print("cached tokens:", [[o.num_cached_tokens for o in run.outputs] for run in runs])
    print(f"bytes by hop, first and second engine: {hops}; copies: {copies}")
    # The host's chain is there too, and may be chosen where it was measured to be quicker.
    assert hops["gpu->ssd"][0] > 0
    assert min(hops["ssd->gpu"]) > 0
    loaded = [ours + hosts for ours, hosts in zip(hops["ssd->gpu"], hops["ssd->cpu"], strict=True)]
    assert loaded[1] == 2 * loaded[0] > 2_000_000
    assert min(copies) > 0
