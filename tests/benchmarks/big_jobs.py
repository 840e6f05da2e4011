"""What a store and a load of 4,096 blocks cost the engine's threads, call by call.

    python -m tests.benchmarks.big_jobs

Processor time of the calling thread, medians of rounds of new blocks: what the machine does besides
is not in it. In the scheduler a store is prepared and ended, and a load; a rank translates vLLM's
lists of block ids, checks the jobs, and reports the slots that it has done with.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.stores.many_blocks import many_keys
from tiered_kv.connector import Handshake, Manager, ManagerLimits, TierView, WorkerReport
from tiered_kv.engine.jobs import check_job
from tiered_kv.index.keyset import KeySet
from tiered_kv.specs import GpuBlock, GpuSpec, LoadJob, StoreJob
from tiered_kv.values import BlockKey, CacheGeometry, Fingerprint, GroupGeometry, JobId
from tiered_kv_nvme import NvmeSpec

BLOCKS = 4_096
BLOCK_TOKENS = 16

T = TypeVar("T")


class Disk:
    """A mirror of a tier whose content is set."""

    state = "ready"
    version: object = 0

    def __init__(self) -> None:
        self.keys = KeySet()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool | None]:
        """As a full mirror answers."""
        return [*self.keys.contains(keys)]

    def forget(self, keys: object) -> None:
        """Nothing is lost here."""

    def close(self, timeout: float) -> bool:
        """Nothing is open."""
        return True


class Bench:
    """A manager with a host tier and one below it, and the times of its calls."""

    def __init__(self, *, host: bool) -> None:
        self.disk = Disk()
        fingerprint = Fingerprint.of({"model": "bench"})
        self.manager = Manager(
            fingerprint=fingerprint,
            host_tier="host" if host else None,
            host_write=host,
            tiers=[TierView("ssd", NvmeSpec, write=True, mirror=lambda *_: self.disk)],
            limits=ManagerLimits(lookup_wait=0.05, retry_backoff=5.0),
            world_size=1,
        )
        geometry = CacheGeometry((GroupGeometry(0, 4096, 1, BLOCK_TOKENS),), 0, 1)
        self.manager.attach([Handshake(fingerprint, geometry, 3 * BLOCKS if host else 0)])
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[[], T]) -> T:
        """Make a call."""
        begin = time.thread_time()
        answer = call()
        self.seconds.setdefault(name, []).append(time.thread_time() - begin)
        return answer

    def round(self, number: int) -> None:
        """Store new blocks and load them."""
        name, timed, manager = f"r{number}", self.timed, self.manager
        keys = [BlockKey(key + bytes(4)) for key in many_keys(number * BLOCKS, BLOCKS)]
        engine = GpuSpec(tuple(GpuBlock(0, (i,)) for i in range(BLOCKS)))
        manager.on_new_request(name)
        plan = timed("manager.prepare_store", lambda: manager.prepare_store(name, keys))
        assert len(plan.keys) == BLOCKS
        store = StoreJob(JobId(2 * number), name, plan.keys, engine, plan.targets)
        timed("check of a store job", lambda: check_job(store))
        slots = () if plan.targets.first is None else plan.targets.first.slots
        report = WorkerReport(released=tuple((0, slot) for slot in slots))
        timed("manager.take_report, slots released", lambda: manager.take_report(report))
        ended = set(plan.keys)
        timed("manager.complete_store", lambda: manager.complete_store(ended))
        self.disk.keys.add(keys)
        timed("manager.lookup", lambda: manager.lookup(name, keys, 0, BLOCKS * BLOCK_TOKENS))
        load = timed("manager.prepare_load", lambda: manager.prepare_load(name, keys))
        job = LoadJob(JobId(2 * number + 1), name, tuple(keys), load.parts, engine)
        timed("check of a load job", lambda: check_job(job))
        timed("manager.complete_load", lambda: manager.complete_load(name, ended))
        manager.on_request_finished(name)


def translated(bench: Bench) -> None:
    """What a rank does with vLLM's list of block ids."""
    try:
        from vllm.v1.kv_offload.base import GPULoadStoreSpec

        from tiered_kv.vllm.jobs import gpu_spec
    except ImportError:
        return
    keys = [BlockKey(key + bytes(4)) for key in many_keys(0, BLOCKS)]
    theirs = GPULoadStoreSpec(list(range(BLOCKS)), group_sizes=[BLOCKS], block_indices=[0])
    ours = bench.timed("vLLM's block ids", lambda: gpu_spec(theirs, keys, {0: 0}, 1, whole=True))
    assert ours.blocks[-1] == GpuBlock(0, (BLOCKS - 1,))


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """By kind of deployment and call, milliseconds."""
    figures: dict[str, dict[str, float]] = {}
    for kind, host in (("host and ssd", True), ("ssd alone", False)):
        bench = Bench(host=host)
        gc.collect()
        gc.freeze()
        for number in range(rounds + 1):
            bench.round(number)
            translated(bench)
            if not number:
                bench.seconds.clear()
        bench.manager.close()
        figures[kind] = {
            name: statistics.median(values) * 1e3 for name, values in bench.seconds.items()
        }
    return figures


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.big_jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=30, help="stores and loads (30)")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    figures = measure(options.rounds)
    if options.json:
        print(json.dumps({"blocks": BLOCKS, "milliseconds": figures}))
        return 0
    kinds = list(figures)
    print(f"{'ms of processor time':40}" + "".join(f"{kind:>16}" for kind in kinds))
    for name in figures[kinds[0]]:
        print(f"{name:40}" + "".join(f"{figures[kind][name]:16.2f}" for kind in kinds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
