"""F40: a lookup of many keys is a pass over memory: no call of LMDB or of the system is made for
it that would give up the GIL or wait for a disk.

`python -m tests.benchmarks.million` measures how long it takes.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from tests.stores.many_blocks import KINDS, Kind, fill_index, many_keys
from tiered_kv.index import Mirror
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.testing.faults import PATIENCE

BLOCKS = 20_000
PREFIX = 10_000
CALLS_A_KEY = 3
"""Of functions that hash a key and note the answer."""
BUDGET = 2**30


def reads() -> int:
    """Reading system calls of this thread so far."""
    file = Path(f"/proc/self/task/{threading.get_native_id()}/io")
    fields = dict(line.split(": ") for line in file.read_text().splitlines())
    return int(fields["syscr"])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_f40_a_long_prefix_is_a_pass_over_memory(kind: Kind, tmp_path: Path) -> None:
    arguments = StoreArguments(tmp_path / "tier", capacity=BUDGET, block_bytes=(4096,))
    held = fill_index(kind, arguments, BLOCKS)
    absent = many_keys(BLOCKS, PREFIX // 2)
    asked = [*held[: PREFIX // 2], *absent]
    mirror = Mirror(lambda: kind.open(arguments.with_(writable=False)), tier="ssd")
    try:
        assert mirror.wait_ready(PATIENCE)
        calls: Counter[str] = Counter()

        def count(frame: FrameType, event: str, argument: object) -> None:
            if event in ("call", "c_call"):
                calls[getattr(argument, "__qualname__", frame.f_code.co_qualname)] += 1

        overhead = -reads() + reads()  # of looking at the counter
        before = reads()
        sys.setprofile(count)
        answers = mirror.lookup(asked)
        sys.setprofile(None)
        read = reads() - before - overhead
        most = calls.most_common(3)
        print(f"{len(asked)} keys: {calls.total()} calls, {read} reads; most: {most}")
        assert answers == [True] * (PREFIX // 2) + [False] * (PREFIX // 2)
        assert 0 < calls.total() <= CALLS_A_KEY * len(asked)
        assert read == 0
        assert not [name for name in calls if name.startswith(("Cursor", "Transaction"))]
    finally:
        mirror.close(PATIENCE)
