"""What the scheduler pays for looking up a prefix of 1,024 blocks among a million.

    python -m tests.benchmarks.lookups

Measured through the calls that vLLM makes. Each round is a request that is new, for one of as many
prefixes as a million blocks are: its connector is asked how much of it can be loaded, and vLLM's
half then asks our manager for one key after the other. "Again" is the same request in later steps,
as long as it waits. What vLLM's half does itself (it names the blocks, and goes through the
answers) is in the figures of the whole call, which have no goal. vLLM's own file-system tier is
asked for as many blocks in the same rounds, until it has found all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.benchmarks.harness import Batch, workspace
from tests.benchmarks.peer_vllm import FileSystemTier, missing_extension
from tests.stores.many_blocks import KINDS, fill_index, many_keys
from tiered_kv.connector import Adapters, Answer, Handshake, Manager, ManagerLimits, TierView
from tiered_kv.index import Mirror
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.values import BlockKey, CacheGeometry, Fingerprint, GroupGeometry
from tiered_kv_nvme import NvmeSpec

PREFIX = 1_024
"""Blocks of a request."""
BLOCK_TOKENS = 16
AGAIN = 20
"""Steps in which a request asks again."""
BYTES_PER_BLOCK = 5_500
"""Capacity to ask for per block of 4 KiB, so that the index has room."""
LATE_SECONDS = 600.0

FIRST, REPEATED, RATIO = "first time", "again in a later step", "vLLM's fs tier / ours, until found"
GOALS = {FIRST: 0.5, REPEATED: 0.1, RATIO: 10.0}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    """The median of the rounds."""
    slow: float
    """Nine of ten rounds are better."""
    unit: str

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        goal = GOALS.get(self.name)
        if goal is None:
            return None
        return self.value >= goal if self.unit == "times" else self.value <= goal


def offload_keys(first: int, count: int) -> list[BlockKey]:
    """Keys as vLLM's: a block's hash and the number of its KV group."""
    return [BlockKey(key + bytes(4)) for key in many_keys(first, count)]


class Engine:
    """vLLM's scheduler half over our connector and manager, and a mirror of the index."""

    def __init__(self, mirror: Mirror) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler,
        )
        from vllm.v1.kv_offload.base import OffloadingKVEventsConfig, ReqContext

        from tiered_kv.vllm.connector import TieredKVConnector
        from tiered_kv.vllm.spec import TieredKVManager

        self._context = ReqContext
        fingerprint = Fingerprint.of({"model": "bench"})
        self.manager = Manager(
            fingerprint=fingerprint,
            host_tier="host",
            host_write=True,
            tiers=[TierView("ssd", NvmeSpec, write=True, mirror=lambda *_: mirror)],
            limits=ManagerLimits(lookup_wait=0.05, retry_backoff=5.0),
            world_size=1,
        )
        geometry = CacheGeometry((GroupGeometry(0, 4096, 1, BLOCK_TOKENS),), 0, 1)
        self.manager.attach([Handshake(fingerprint, geometry, 1024)])
        self.tiered = TieredKVManager(self.manager, Adapters(str, wait=1.0))
        self.connector: Any = object.__new__(TieredKVConnector)
        self.connector._spec = cast(Any, SimpleNamespace(manager=self.tiered))
        self.connector._hashes = ((0, 1),)
        self.connector._bounding_group_ids = ()
        self.connector.connector_scheduler = OffloadingConnectorScheduler(
            cast(Any, _spec(self.tiered, OffloadingKVEventsConfig(False, False))),
            cast(Any, _vllm_config()),
            cast(Any, _cache_config()),
        )

    def request(self, name: str, keys: Sequence[BlockKey]) -> Any:
        """A request that was added."""
        request = SimpleNamespace(
            request_id=name,
            block_hashes=[key[:-4] for key in keys],
            num_tokens=len(keys) * BLOCK_TOKENS,
            num_prompt_tokens=len(keys) * BLOCK_TOKENS,
            kv_transfer_params=None,
            kv_hints=None,
            lora_request=None,
            skip_reading_prefix_cache=False,
        )
        self.connector.on_new_request(request)
        return request

    def ours(self, request: Any, keys: Sequence[BlockKey]) -> float:
        """Seconds in our code alone."""
        lookup, context = self.tiered.lookup, self._context(request.request_id)
        asked = [cast(Any, key) for key in keys]
        begin = time.perf_counter()
        self.connector._ask(request, 0)
        with self.tiered.reading(request.request_id):
            for key in asked:
                lookup(key, context)
        seconds = time.perf_counter() - begin
        found = list(self.manager.answers(request.request_id).values())
        assert found == [Answer.HIT] * len(keys)
        return seconds

    def whole(self, request: Any) -> float:
        """Seconds of vLLM's call."""
        begin = time.perf_counter()
        tokens, waits = self.connector.get_num_new_matched_tokens(request, 0)
        seconds = time.perf_counter() - begin
        assert (tokens, waits) == (request.num_tokens, True), tokens
        return seconds

    def end(self, request: Any) -> None:
        """The request is over."""
        self.manager.on_request_finished(request.request_id)
        self.connector.connector_scheduler._req_status.pop(request.request_id)

    def close(self) -> None:
        """Let go of everything."""
        self.tiered.shutdown()


def _spec(manager: Any, events: Any) -> SimpleNamespace:
    group = SimpleNamespace(tokens_per_block=BLOCK_TOKENS, layer_names=("layer",), group_id=0)
    return SimpleNamespace(
        config=SimpleNamespace(groups=(group,)),
        blocks_per_chunk=1,
        tokens_per_hash=BLOCK_TOKENS,
        tokens_per_block=(BLOCK_TOKENS,),
        offload_prompt_only=False,
        kv_events_config=events,
        get_manager=lambda: manager,
    )


def _vllm_config() -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=None, enable_prefix_caching=True
        ),
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
    )


def _cache_config() -> SimpleNamespace:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    attention = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=attention, is_eagle_group=False)
    return SimpleNamespace(kv_cache_groups=[group])


def measure(folder: Path, blocks: int, rounds: int) -> list[Figure]:
    """All figures."""
    (kind,) = (kind for kind in KINDS if kind.name == "nvme")
    arguments = StoreArguments(
        folder / "tier", capacity=blocks * BYTES_PER_BLOCK, block_bytes=(4096,)
    )
    fill_index(kind, arguments, blocks, offload_keys)
    with ExitStack() as stack:
        reading = arguments.with_(writable=False)
        mirror = Mirror(lambda: kind.open(reading), tier="ssd")
        stack.callback(mirror.close)
        if not mirror.wait_ready(LATE_SECONDS):
            raise RuntimeError(f"the index was not read: {mirror.state}")
        engine = Engine(mirror)
        stack.callback(engine.close)
        peer = FileSystemTier(folder / "peer", Batch(4096, PREFIX), threads=16)
        stack.callback(peer.close)
        peer.save()
        gc.collect()
        gc.freeze()
        choice = random.Random(1)
        seconds: dict[str, list[float]] = {}

        def note(name: str, call: Callable[[], float]) -> float:
            found = call()
            seconds.setdefault(name, []).append(found)
            return found

        for number in range(rounds + 1):
            if number == 1:
                seconds.clear()  # the first one warms up
            keys = offload_keys(choice.randrange(blocks // PREFIX) * PREFIX, PREFIX)
            request = engine.request(f"ours {number}", keys)
            first = note(FIRST, lambda: engine.ours(request, keys))  # noqa: B023 - called at once
            for _ in range(AGAIN):
                note(REPEATED, lambda: engine.ours(request, keys))  # noqa: B023
            engine.end(request)
            request = engine.request(f"whole {number}", keys)
            note("whole call, first time", lambda: engine.whole(request))  # noqa: B023
            for _ in range(AGAIN):
                note("whole call, again", lambda: engine.whole(request))  # noqa: B023
            engine.end(request)
            theirs, steps = peer.find()
            seconds.setdefault("vLLM's fs tier, until found", []).append(theirs)
            seconds.setdefault(RATIO, []).append(theirs / first)
            seconds.setdefault("vLLM's fs tier, steps until then", []).append(steps)
    return [_figure(name, values) for name, values in seconds.items()]


def _figure(name: str, values: Sequence[float]) -> Figure:
    unit = "times" if name == RATIO else "steps" if name.endswith("then") else "ms"
    if unit == "ms":
        values = [value * 1e3 for value in values]
    ordered = sorted(values, reverse=unit == "times")
    return Figure(name, statistics.median(values), ordered[int(0.9 * len(ordered))], unit)


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    print(f"{'':44}{'median':>10}{'9 of 10':>10}")
    for one in figures:
        verdict = ""
        if one.met is not None:
            bound = "at least" if one.unit == "times" else "at most"
            verdict = f"  {bound} {GOALS[one.name]:g}: {'reached' if one.met else 'NOT REACHED'}"
        print(f"{one.name:44}{one.value:10.3f}{one.slow:10.3f} {one.unit}{verdict}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.lookups",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--path", type=Path, help="directory on the disk (default: temporary)")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="indexed (1,000,000)")
    parser.add_argument("--rounds", type=int, default=100, help="requests (100)")
    parser.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    options = parser.parse_args()
    missing = missing_extension()
    if missing:
        parser.exit(2, f"nothing to compare with: {missing}\n")
    with workspace(options.path) as folder:
        figures = measure(folder, options.blocks, options.rounds)
    if options.json:
        found = [asdict(one) | {"met": one.met} for one in figures]
        print(json.dumps({"blocks": options.blocks, "prefix": PREFIX, "figures": found}))
    else:
        show(figures)
    return 0 if all(one.met is not False for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
