"""LMCache's local disk backend, driven in a process of another environment.

    python3 -m venv .venv-lmcache
    .venv-lmcache/bin/pip install --no-deps -r .ci/lock-engine.txt
    .venv-lmcache/bin/pip install --no-deps -r tests/benchmarks/lock-lmcache.txt

The process takes rounds over a pipe, so that they alternate with ours, and measures them itself.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.benchmarks.harness import Batch, Took

__all__ = ["PYTHON", "LmcacheDisk", "missing_lmcache"]

PYTHON = Path(".venv-lmcache/bin/python")
WAIT_SECONDS = 180.0
_LOG_LINES = 20


def missing_lmcache(python: Path) -> str:
    """Why no ratio to LMCache can be given; empty where its environment is there."""
    if python.exists():
        return ""
    return f"{python} is not there (tests/benchmarks/peer_lmcache.py says how it is made)"


class LmcacheDisk:
    """The process. A context manager: it is gone when the block is left."""

    def __init__(self, python: Path, folder: Path, batch: Batch) -> None:
        """Its files and its log go to `folder`, which is made."""
        folder.mkdir()
        self._log = folder / "log"
        files = folder / "files"
        files.mkdir()
        command = [
            *(str(python), "-m", "tests.benchmarks.lmcache_process"),
            *(str(files), str(batch.block_bytes), str(batch.blocks)),
        ]
        environment = {**os.environ, "LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self._pending = b""

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)

    def save(self) -> Took:
        """Store all blocks."""
        return self._took("save")

    def load(self) -> Took:
        """Load all blocks."""
        return self._took("load")

    def renew(self) -> None:
        """Have the next store write blocks that are not there."""
        self._took("renew")

    def wipe(self) -> None:
        """Overwrite the memory that the next load gets."""
        self._took("wipe")

    def check(self) -> None:
        """Raise `RuntimeError` where the last load did not bring the bytes that were stored."""
        self._took("check")

    def _took(self, word: str) -> Took:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        self._process.stdin.flush()
        return Took(**self._answer())

    def _answer(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        while b"\n" not in self._pending:
            ready, _, _ = select.select([stream], [], [], WAIT_SECONDS)
            piece = os.read(stream.fileno(), 1 << 16) if ready else b""
            if not piece:
                tail = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                why = "ended" if ready else f"gave no answer within {WAIT_SECONDS:g} s"
                raise RuntimeError(
                    "\n".join([f"LMCache's process {why}; its log ends with:", *tail])
                )
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
