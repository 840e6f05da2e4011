"""A file per block, as simple tiers have it: direct, renamed into place, threads that each take the
next block. No index, no budget, no checksum; from and to a host pool like ours."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.harness import Batch, keys_of
from tiered_kv.memory import HostBlockPool

__all__ = ["FilePerBlock"]


class FilePerBlock:
    """The files, and the memory of their blocks."""

    def __init__(self, root: Path, batch: Batch, threads: int, *, direct: bool) -> None:
        """In the folder `root`, which is made; `direct`: with O_DIRECT."""
        root.mkdir()
        self._root, self._batch, self._threads = root, batch, threads
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._pool = HostBlockPool(batch.blocks, 0, batch.block_bytes)
        self._views = [self._pool.as_array(number).data for number in range(batch.blocks)]
        self._content = os.urandom(batch.block_bytes)
        for view in self._views:
            view[:] = self._content
        self._executor = ThreadPoolExecutor(threads)
        self._names: list[Path] = []
        self.renew()

    def renew(self) -> None:
        """Remove the files; the next store makes others."""
        for name in self._names:
            name.unlink(missing_ok=True)
        self._names = [self._root / key.hex() for key in keys_of(self._batch)]

    def wipe(self) -> None:
        """Overwrite the memory, so that only a load makes it right again."""
        for view in self._views:
            view[:64] = bytes(64)

    def save(self) -> None:
        """Store all blocks."""
        self._each(self._write)

    def load(self) -> None:
        """Load all blocks."""
        self._each(self._read)

    def _each(self, move: Callable[[Path, memoryview], None]) -> None:
        pairs = iter(list(zip(self._names, self._views, strict=True)))

        def work(_: int) -> None:
            for name, view in pairs:
                move(name, view)

        list(self._executor.map(work, range(self._threads)))

    def _write(self, name: Path, view: memoryview) -> None:
        temporary = name.with_suffix(".tmp")
        self._move(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.pwritev, view)
        temporary.replace(name)

    def _read(self, name: Path, view: memoryview) -> None:
        self._move(name, os.O_RDONLY, os.preadv, view)

    def _move(
        self,
        name: Path,
        flags: int,
        call: Callable[[int, Sequence[memoryview], int], int],
        view: memoryview,
    ) -> None:
        fd = os.open(name, self._flags | flags, 0o600)
        try:
            if call(fd, [view], 0) != view.nbytes:
                raise RuntimeError(f"{name}: a block was moved in part only")
        finally:
            os.close(fd)

    def check(self) -> None:
        """Raise `RuntimeError` where a load did not bring the bytes that were stored."""
        if any(bytes(view) != self._content for view in self._views):
            raise RuntimeError("the files did not bring back what was stored")

    def close(self) -> None:
        """End its threads, and let the memory go."""
        self._executor.shutdown()
        self._views.clear()
        self._pool.close()
