"""vLLM's own file-system tier, driven through its `FileSystemTierManager`: a batch in one job, or
in several at once.

One job runs on one thread there. It has as many threads as it has by default, or more where that
many jobs come at once. Its files are direct, renamed into place, not flushed and not checked; its
memory is shared, as its pool is.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tests.benchmarks.harness import Batch, keys_of

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

__all__ = ["STEP_SECONDS", "FileSystemTier", "missing_extension"]

STEP_SECONDS = 0.0002
"""Between two look-ups of a request that waits: far less than any step of an engine."""

DEFAULT_THREADS = 16
"""For reading, and as many for writing."""


def missing_extension() -> str:
    """Why no ratio to vLLM can be given; empty where its tier can be used as it is shipped, with
    its C extension `fs_io_C` loaded."""
    try:
        from vllm.v1.kv_offload.tiering.fs import io, manager
    except ImportError as error:
        return f"vLLM's fs tier is not there ({error})"
    if not (io._HAS_FSIO_C and manager._HAS_BATCH_LOOKUP_C):
        return "vLLM's fs tier did not load its C extension fs_io_C"
    return ""


class FileSystemTier:
    """A tier of files below `root`, and the memory that it moves blocks from and to."""

    def __init__(
        self, root: Path, batch: Batch, threads: int = DEFAULT_THREADS, *, jobs: int = 1
    ) -> None:
        """Its folder is `root`; each batch is moved in so many `jobs`. `threads` as the tier's
        `n_read_threads` and `n_write_threads`, at least as many as there are jobs."""
        from vllm.v1.kv_offload.base import (
            OffloadingKVEventsConfig,
            ReqContext,
            make_offload_key,
        )
        from vllm.v1.kv_offload.config import (
            OffloadingCacheConfig,
            OffloadingConfig,
            OffloadingGroupConfig,
            OffloadingModelConfig,
            OffloadingParallelConfig,
        )
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self._batch, self._jobs = batch, jobs
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(32, ("layer",), 0),),
            worker_kv_bytes_per_block=batch.block_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(32, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        spec = SimpleNamespace(
            config=config,
            blocks_per_chunk=1,
            kv_events_config=OffloadingKVEventsConfig(False, False),
            extra_config={},
        )
        self._map = mmap.mmap(-1, batch.total_bytes)
        self.memory: npt.NDArray[np.int8] = np.frombuffer(self._map, np.int8).reshape(
            batch.blocks, batch.block_bytes
        )
        rng = np.random.default_rng(0)
        self.memory[:] = rng.integers(-128, 127, self.memory.shape, np.int8)
        self._content = self.memory.copy()
        self.tier = FileSystemTierManager(
            cast(Any, spec),
            memoryview(self._map).cast("b", [batch.blocks, batch.block_bytes]),
            "fs",
            str(root),
            n_read_threads=max(threads, jobs),
            n_write_threads=max(threads, jobs),
        )
        self._key_of: Callable[[bytes, int], Any] = make_offload_key
        self._keys = self._new_keys()
        self._request = ReqContext("bench")
        self._job = 0

    def _new_keys(self) -> list[Any]:
        return [self._key_of(key[:32], 0) for key in keys_of(self._batch)]

    @property
    def direct(self) -> bool:
        """Whether its files are opened with O_DIRECT."""
        return bool(self.tier._use_o_direct)

    def save(self) -> None:
        """Store all blocks."""
        self._run(store=True)

    def load(self) -> None:
        """Load all blocks."""
        self._run(store=False)

    def _run(self, *, store: bool) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        submit = self.tier.submit_store if store else self.tier.submit_load
        for places in np.array_split(np.arange(self._batch.blocks, dtype=np.int32), self._jobs):
            self._job += 1
            keys = [self._keys[place] for place in places]
            submit(TransferJob(self._job, keys, places, not store, self._request))
        self.tier.drain_jobs()
        results = list(self.tier.get_finished_jobs())
        if [result.success for result in results] != [True] * self._jobs:
            raise RuntimeError(f"vLLM's jobs failed: {results}")

    def renew(self) -> None:
        """Have the next store write blocks that are not there: it would skip the others.

        Nothing is deleted meanwhile, and the new blocks' folders exist, as they do in a tier that
        has been in use for long.
        """
        self._keys = self._new_keys()
        for key in self._keys:
            name = self.tier.file_mapper.get_file_name(key)
            Path(name).parent.mkdir(parents=True, exist_ok=True)

    def wipe(self) -> None:
        """Overwrite the memory, so that only a load makes it right again."""
        self.memory[:] = 0

    def check(self) -> None:
        """Raise `RuntimeError` where a load did not bring the bytes that were stored."""
        if not np.array_equal(self.memory, self._content):
            raise RuntimeError("vLLM's tier did not bring back what was stored")

    def find(self) -> tuple[float, int]:
        """Look all blocks up as vLLM's scheduler does, each at every step, for a request that is
        new, until all are found: seconds that this takes, and steps."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

        self._job += 1
        request = ReqContext(f"request {self._job}")
        steps = 0
        begin = time.perf_counter()
        while True:
            steps += 1
            found = [self.tier.lookup(key, request) for key in self._keys]
            if all(result is LookupResult.HIT for result in found):
                break
            if LookupResult.MISS in found:
                raise RuntimeError("vLLM's tier does not find what it stored")
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(STEP_SECONDS)  # the model computes
        seconds = time.perf_counter() - begin
        self.tier.on_request_finished(request)
        return seconds, steps

    def close(self) -> None:
        """End its threads."""
        self.tier.on_request_finished(self._request)
        self.tier.shutdown()
