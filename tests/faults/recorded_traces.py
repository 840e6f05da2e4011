"""Records traces: on a tiny disk that others fill up, or beside other engines in one directory.

`python -m tests.faults.recorded_traces SCENARIO FOLDER ...`, for the arguments see the functions.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from tests.disks import fill
from tests.faults.full_disk import image, mount
from tiered_kv.connector import TraceRecorder, trace_files
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.planning import read_trace
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.faults import PATIENCE
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry

GEOMETRY = CacheGeometry((GroupGeometry(0, 4096, 1, 16),), 0, 1)


class Recording:
    """A recorder that tries anew at once, and what it counted."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.stats = StatsRecorder("manager")
        self.recorder = TraceRecorder(folder, max_bytes, self.stats, retry_seconds=0.0)
        self.recorder.begin(GEOMETRY)

    def request(self, number: int, blocks: int) -> bool:
        """One request comes and goes; whether it was recorded."""
        before = [self.counted("recorded"), self.counted("dropped")]
        wanted = [BlockKey(f"block {n} of {number}".encode()) for n in range(blocks)]
        state = RequestState(None, answers=dict.fromkeys(wanted, Answer.MISS))
        self.recorder.looked_up(str(number), state, wanted, 0, blocks * 16)
        self.recorder.finished(str(number))
        for _ in range(int(PATIENCE / 0.002)):
            now = [self.counted("recorded"), self.counted("dropped")]
            if now != before:
                return now[0] > before[0]
            threading.Event().wait(0.002)
        raise AssertionError("the recorder does not go on")

    def counted(self, outcome: str) -> float:
        return self.stats.snapshot().counter("trace_requests_total", outcome)

    def close(self) -> None:
        assert self.recorder.close(PATIENCE)


def full(folder: Path, file_system: str) -> None:
    """Others fill the disk before the first request, and again while a file is written."""
    what = image(folder, 16) if file_system == "ext4" else "tmpfs"
    mount(folder / "disk", what)
    trace, filler = folder / "disk" / "trace", folder / "disk" / "filler"
    first = Recording(trace, 2**20)
    fill(filler)
    taken = first.request(0, 500)
    left = [*trace.iterdir()] if trace.exists() else []
    print("before there is a secret:", taken, left)
    assert not taken
    # ext4 may have kept some pages back, which a secret fits into.
    assert all(file.name == "lock" or file.stat().st_size for file in left)
    assert trace_files(trace) == []
    filler.unlink()
    assert first.request(0, 4)
    first.close()
    one = Recording(trace, 2**20)
    fill(filler)
    assert [one.request(number, 500) for number in range(20)] == [False] * 20
    sizes = {file.name: file.stat().st_size for file in trace_files(trace)}
    print("before another engine's first request:", sizes)
    assert len(sizes) == 1, "a failed attempt leaves a file behind"
    filler.unlink()
    assert one.request(20, 4)
    fill(filler)
    outcomes = [one.request(number, 500) for number in range(21, 41)]
    sizes = {file.name: file.stat().st_size for file in trace_files(trace)}
    print("while a file is written:", outcomes, sizes)
    assert not all(outcomes)
    assert len(sizes) == 2, "a failed attempt leaves a file behind"
    assert all(sizes.values())
    filler.unlink()
    assert one.request(41, 4)
    one.close()
    read = read_trace(trace)
    print(f"space is back: {len(read.requests)} requests; {read.notes}")
    assert len(read.requests) == 3 + sum(outcomes)


def beside(folder: Path, max_bytes: int, requests: int) -> None:
    """One of several engines: nearly each of its requests takes a file of its own."""
    print("ready", flush=True)
    sys.stdin.readline()
    one = Recording(folder, max_bytes)
    recorded = sum(one.request(number, max_bytes // 8 // 21) for number in range(requests))
    one.close()
    print(recorded)


if __name__ == "__main__":
    if sys.argv[1] == "full":
        full(Path(sys.argv[2]), sys.argv[3])
        print("done")
    else:
        beside(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
