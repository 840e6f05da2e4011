"""What an engine records of its requests: enough to plan from, no text, and never at the expense of
serving."""

from __future__ import annotations

import fcntl
import json
import resource
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.simulation_rig import FULL, TWO_GROUPS, WINDOW, Stage, store_prompt, tokens
from tiered_kv.config import MIB, TraceSettings
from tiered_kv.connector import TraceRecorder, recording, trace_files
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.errors import TraceError
from tiered_kv.planning import Trace, TraceKind, read_trace
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.faults import PATIENCE
from tiered_kv.testing.simulation import SimulatedModel, Simulation
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry

BLOCK = TWO_GROUPS.chunk_tokens(0)
GEOMETRY = CacheGeometry((GroupGeometry(0, 4096, 1, 16), GroupGeometry(1, 1024, 1, 16)), 0, 2)


def keys(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(f"the key of block {n} of {name}".encode()) for n in range(count)]


class Recording:
    """A recorder, and what it counted."""

    def __init__(self, folder: Path, max_bytes: int = MIB, retry_seconds: float = 0.0) -> None:
        self.stats = StatsRecorder("manager")
        self.recorder = TraceRecorder(
            folder, max_bytes, self.stats, clock=lambda: 100.0, retry_seconds=retry_seconds
        )
        self.recorder.begin(GEOMETRY)

    def request(self, name: str, blocks: int = 4) -> None:
        """One request comes and goes, of which nothing was found."""
        wanted = keys(name, blocks)
        state = RequestState(None, answers=dict.fromkeys(wanted, Answer.MISS))
        self.recorder.looked_up(name, state, wanted, 0, blocks * 16)
        self.recorder.finished(name)

    def counted(self, outcome: str) -> float:
        return self.stats.snapshot().counter("trace_requests_total", outcome)

    def wait(self, **counts: int) -> None:
        """Until so many were counted, by outcome."""
        wait_until(lambda: all(self.counted(name) == count for name, count in counts.items()))

    def close(self) -> None:
        assert self.recorder.close(PATIENCE)


def test_a_simulated_engine_records_a_trace_that_a_plan_reads(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    stage = Stage(trace=TraceSettings(path=folder))
    long = tokens(1, 48)
    with Simulation(stage.assembly, TWO_GROUPS) as engine:
        store_prompt(engine, long)
        again = engine.add(long, 4, tiers=("ssd",))
        engine.run()
        own = engine.add((*long, *tokens(2, 16)), 3)
        engine.run()
        assert engine.settle()
        loaded = engine.counts.loaded_tokens
        recorded = engine.manager.stats.snapshot().counter("trace_requests_total", "recorded")
    trace = read_trace(folder)
    print(f"{len(trace.requests)} requests recorded, {recorded} of them before the end; {trace}")
    assert trace.kind is TraceKind.RECORDED
    assert trace.block_tokens == BLOCK
    geometry = stage_geometry()
    assert trace.bytes_per_token == pytest.approx(geometry)
    # The look-up by which the test waited for the store is one, too, without a known length.
    assert [(r.tokens, r.output_tokens) for r in trace.requests] == [(48, 1), (48, 4), (64, 3)]
    assert len(again.output) == 4
    assert len(own.output) == 3
    first, second, third = (request.keys for request in trace.requests)
    assert first == second == third[: len(first)]
    assert len(set(third)) == 64 // BLOCK
    assert trace.recorded_hits["ssd"] == len(long) >= loaded > 0
    assert trace.recorded_hits["engine"] > 0
    assert not trace.notes
    assert trace.requests[0].time == 0.0


def test_a_group_that_is_kept_whole_tells_what_was_found(tmp_path: Path) -> None:
    """Of one with a window, the beginning of a prefix is not even stored."""
    model = SimulatedModel(groups=(WINDOW, FULL), blocks=60, chunk=2)
    stage = Stage(trace=TraceSettings(path=tmp_path))
    with Simulation(stage.assembly, model) as engine:
        store_prompt_of(engine, tokens(1, 48))
        engine.add(tokens(1, 48), tiers=("ssd",))
        engine.run()
        assert engine.settle()
        loaded = engine.counts.loaded_tokens
    trace = read_trace(tmp_path)
    print(trace.recorded_hits, loaded)
    assert [request.tokens for request in trace.requests] == [48, 48]
    assert trace.recorded_hits["ssd"] == 48 >= loaded > 0


def store_prompt_of(engine: Simulation, prompt: tuple[int, ...]) -> None:
    assert engine.wait_ready()
    engine.add(prompt)
    engine.run()
    assert engine.settle()
    # The last group is found whole; of the first one the beginning is not stored.
    wait_until(lambda: set(engine.lookup(prompt, "ssd")[-len(prompt) // BLOCK :]) == {Answer.HIT})
    engine.forget_device_cache()


def stage_geometry() -> float:
    """Bytes of a token, of both groups on both ranks, as the simulated ranks report them."""
    with Simulation(Stage().assembly, TWO_GROUPS) as engine:
        shape = engine.manager.view().cache
        assert shape is not None
        assert shape.ranks == 2
        return shape.bytes_per_token


def test_nothing_of_a_key_is_in_it_and_the_secret_is_the_owners(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "trace"
    for _ in range(2):  # another life, with the same secret
        one = Recording(folder)
        one.request("a")
        one.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    print(modes)
    assert set(modes.values()) == {0o600}
    assert set(modes) == {"lock", "secret", *(file.name for file in trace_files(folder))}
    assert len(modes) == 4
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = (folder / "secret").read_bytes()
    text = b"".join(file.read_bytes() for file in trace_files(folder))
    for key in keys("a", 4):
        assert text.count(key) == 0
        assert key.hex().encode() not in text
    assert secret.hex().encode() not in text
    assert secret not in text
    first, second = (request.keys for request in read_trace(folder).requests)
    assert first == second
    assert len(set(first)) == 4
    other = Recording(tmp_path / "other")
    other.request("a")
    other.close()
    assert not set(read_trace(tmp_path / "other").requests[0].keys) & set(first)
    (stranger,) = trace_files(tmp_path / "other")
    stranger.rename(folder / stranger.name)
    with pytest.raises(TraceError, match="another secret"):
        read_trace(folder)


def test_the_oldest_file_goes_before_the_budget_is_exceeded(tmp_path: Path) -> None:
    one = Recording(tmp_path, max_bytes=MIB)
    written = 0
    most = 0
    for number in range(600):
        one.request(f"request {number}", 200)
        written += 1
        one.wait(recorded=written)
        most = max(most, sum(file.stat().st_size for file in trace_files(tmp_path)))
    one.close()
    kept = read_trace(tmp_path)
    print(f"{len(kept.requests)} of {written} requests kept, {most} bytes at most")
    assert 100 < len(kept.requests) < written
    assert most <= MIB
    assert len(trace_files(tmp_path)) >= recording.FILES - 1
    assert one.counted("dropped") == 0


def test_an_engine_for_which_there_is_no_room_deletes_nothing(tmp_path: Path) -> None:
    one = Recording(tmp_path, max_bytes=MIB)
    for number in range(250):
        one.request(f"request {number}", 200)
        one.wait(recorded=number + 1)
    before = trace_files(tmp_path)
    smaller = Recording(tmp_path, max_bytes=MIB // 32)
    smaller.request("late", 1)
    smaller.wait(dropped=1)
    smaller.close()
    print(f"{len(before)} files, of which one is written to")
    assert trace_files(tmp_path) == before
    assert len(before) > 2
    one.close()


def test_files_that_another_engine_writes_are_left_alone(tmp_path: Path) -> None:
    others = [Recording(tmp_path, MIB) for _ in range(recording.FILES)]
    for number, other in enumerate(others):
        other.request(f"of engine {number}")
        other.wait(recorded=1)
    late = Recording(tmp_path, MIB)
    late.request("late")
    late.wait(dropped=1)
    assert len(trace_files(tmp_path)) == recording.FILES
    others[0].close()
    late.request("later")
    late.wait(recorded=1)
    for one in (*others[1:], late):
        one.close()
    names = len(read_trace(tmp_path).requests)
    print(f"{names} requests in {recording.FILES} files")
    assert names == recording.FILES  # that of the first engine made room for the late one's
    last = json.loads(trace_files(tmp_path)[-1].read_text().splitlines()[-1])
    assert last["dropped"] == 1


def test_an_engine_that_is_stopped_over_its_turn_costs_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "TURN_SECONDS", 0.05)
    other = Recording(tmp_path)
    other.request("first")
    other.close()
    one = Recording(tmp_path)
    with (tmp_path / "lock").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        one.request("a")
        one.wait(dropped=1)
    one.request("b")
    one.wait(recorded=1)
    one.close()
    print(caplog.text)
    assert f"another process holds {tmp_path / 'lock'}" in caplog.text
    assert len(read_trace(tmp_path).requests) == 2


def test_empty_files_of_killed_engines_go(tmp_path: Path) -> None:
    (tmp_path / "trace-20250101T000000.000000000-1-abcdef.jsonl").touch()
    one = Recording(tmp_path)
    one.request("a")
    one.close()
    assert len(trace_files(tmp_path)) == len(read_trace(tmp_path).requests) == 1


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.002)):
        if condition():
            return
        threading.Event().wait(0.002)
    raise AssertionError("it did not come to pass")


def test_a_disk_that_hangs_costs_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()
    write = recording._Files.write

    def hang(self: recording._Files, wanted: recording._Wanted, dropped: int) -> None:
        hangs.set()
        assert goes_on.wait(PATIENCE)
        write(self, wanted, dropped)

    monkeypatch.setattr(recording._Files, "write", hang)
    one = Recording(tmp_path)
    one.request("first")
    assert hangs.wait(PATIENCE)
    for number in range(recording.MOST_WAITING + 7):
        one.request(f"request {number}")
    assert one.counted("dropped") == 7
    assert not one.recorder.close(0.01)  # the end does not wait for it
    goes_on.set()
    expected = recording.MOST_WAITING + 1
    one.wait(recorded=expected)
    trace = read_trace(tmp_path)
    print(f"{len(trace.requests)} recorded; {trace.notes}")
    assert len(trace.requests) == expected
    assert trace.notes == ("7 further requests were not recorded, since the recorder was slow.",)


def test_an_engine_whose_trace_cannot_be_written_serves_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    stage = Stage(trace=TraceSettings(path=tmp_path / "file" / "trace"))
    with Simulation(stage.assembly, TWO_GROUPS) as engine:
        store_prompt(engine, tokens(1, 48))
        engine.add(tokens(1, 48), tiers=("ssd",))
        engine.run()
        assert engine.settle()
        snapshot = engine.manager.stats.snapshot
        wait_until(lambda: snapshot().counter("trace_requests_total", "dropped") == 2)
        assert engine.counts.loaded_blocks["ssd"] > 0
        assert not engine.audit()
    told = [record for record in caplog.records if "recording a trace" in record.getMessage()]
    print([record.getMessage() for record in told])
    assert len(told) == 1  # and not once per request


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_did_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    one = Recording(tmp_path)
    one.request("whole")
    one.wait(recorded=1)
    (file,) = trace_files(tmp_path)
    with largest_file(file.stat().st_size + 30):
        one.request("half")
        one.wait(dropped=1)
    assert file.read_bytes().endswith(b"\n")
    one.request("whole again")
    one.wait(recorded=2)
    one.close()
    trace = read_trace(tmp_path)
    assert len(trace.requests) == 2
    assert "1 further requests" in trace.notes[0]


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    one = Recording(tmp_path)
    one.request("a")
    one.close()
    (tmp_path / "secret").chmod(0o644)
    two = Recording(tmp_path)
    two.request("b")
    two.wait(dropped=1)
    two.close()
    assert len(read_trace(tmp_path).requests) == 1


def test_the_last_line_of_a_killed_engine_is_left_out_with_a_note(tmp_path: Path) -> None:
    one = Recording(tmp_path)
    for name in ("a", "b"):
        one.request(name)
    one.close()
    (file,) = trace_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-9])
    trace: Trace = read_trace(tmp_path)
    assert len(trace.requests) == 1
    assert trace.notes == (f"{file}:3: the last line is cut off, and left out.",)
