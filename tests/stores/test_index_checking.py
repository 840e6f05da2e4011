"""When an index is checked before LMDB maps it, by whom, and what an answer that fails means."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.stores.test_index_environment import (
    HOLD,
    change_marker,
    entries,
    fill,
    open_environment,
    run_child,
)
from tiered_kv.errors import TierError
from tiered_kv.index import BlockIndex, checking, witness
from tiered_kv.testing.conformance.blocks import NAMESPACE, StoreArguments

MID_COMMIT = """
e = t.open_environment(Path(sys.argv[1]))
n = e.database("numbers")
with e.write() as txn: txn.put(b"held", b"1", db=n)
with e.write() as txn:
    txn.put(b"never", b"1", db=n)
    print("open", flush=True)
    sys.stdin.readline()
"""


class Checks(list[Path]):
    """The files that were checked."""


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    seen = Checks()
    real = checking.find_damage

    def find_damage(data: Path) -> str | None:
        seen.append(data)
        return real(data)

    monkeypatch.setattr(checking, "find_damage", find_damage)
    return seen


def kill(path: Path, code: str = HOLD) -> None:
    """A process opens the directory, writes, and is killed."""
    child = run_child(code, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()


# ------------------------------------------------------------------------------- when it is checked


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("code", [HOLD, MID_COMMIT])
def test_what_a_killed_process_left_is_opened_unchecked(
    tmp_path: Path, checks: Checks, code: str, writable: bool
) -> None:
    kill(tmp_path, code)
    environment = open_environment(tmp_path, writable=writable)
    assert entries(environment) == 1
    assert checks == []
    environment.close()


@pytest.mark.parametrize("code", [HOLD, MID_COMMIT])
def test_what_somebody_changed_afterwards_is_checked(
    tmp_path: Path, checks: Checks, code: str
) -> None:
    kill(tmp_path, code)
    data = tmp_path / "data.mdb"
    after = data.stat().st_mtime_ns + 2 * 10**9
    os.utime(data, ns=(after, after))
    environment = open_environment(tmp_path)
    assert entries(environment) == 1
    assert checks == [data]
    environment.close()


@pytest.mark.parametrize("code", [HOLD, MID_COMMIT])
def test_what_lacks_pages_that_are_in_use_is_set_aside_whatever_its_time_says(
    tmp_path: Path, checks: Checks, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """LMDB would map it, and die of the first page that it needs."""
    kill(tmp_path, code)
    data = tmp_path / "data.mdb"
    left = data.stat()
    os.truncate(data, left.st_size // 8192 * 4096)
    os.utime(data, ns=(left.st_atime_ns, left.st_mtime_ns))
    environment = open_environment(tmp_path)
    assert entries(environment) == 0
    assert checks == [data]
    assert "set aside" in caplog.text
    environment.close()


def test_a_damaged_page_in_what_a_killed_process_left_is_found(
    tmp_path: Path, checks: Checks, caplog: pytest.LogCaptureFixture
) -> None:
    kill(tmp_path)
    data = tmp_path / "data.mdb"
    content = bytearray(data.read_bytes())
    for page in range(2, len(content) // 4096):
        content[page * 4096 + 8 : page * 4096 + 16] = b"\xff" * 8
    data.write_bytes(content)
    environment = open_environment(tmp_path)
    assert entries(environment) == 0
    assert checks == [data]
    assert "set aside" in caplog.text
    environment.close()


def test_what_is_no_file_of_lmdb_is_set_aside_whatever_its_time_says(
    tmp_path: Path, checks: Checks, caplog: pytest.LogCaptureFixture
) -> None:
    kill(tmp_path)
    data = tmp_path / "data.mdb"
    before = data.stat()
    data.write_bytes(bytes(before.st_size))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))  # as within one tick of the clock
    environment = open_environment(tmp_path)
    assert entries(environment) == 0
    assert checks == [data]
    assert "set aside" in caplog.text
    environment.close()


def test_after_a_crash_of_the_machine_it_is_checked(tmp_path: Path, checks: Checks) -> None:
    kill(tmp_path)
    change_marker(tmp_path, boot_id="0" * 32, durability="batch")
    environment = open_environment(tmp_path)
    assert entries(environment) == 1
    assert checks == [tmp_path / "data.mdb"]
    environment.close()


@pytest.mark.parametrize("note", [b"", b"\0" * 32, b"x" * 31, os.urandom(64)])
def test_without_a_note_it_is_checked(tmp_path: Path, checks: Checks, note: bytes) -> None:
    kill(tmp_path)
    (tmp_path / "users.lock").write_bytes(note)
    environment = open_environment(tmp_path)
    assert entries(environment) == 1
    assert checks == [tmp_path / "data.mdb"]
    environment.close()


def test_a_note_that_cannot_be_taken_costs_a_check_and_nothing_else(
    tmp_path: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tier"
    environment = open_environment(path)
    numbers = environment.database("numbers")
    told = witness.Witness(path, os.open("/dev/full", os.O_WRONLY))
    monkeypatch.setattr(environment, "_witness", told)
    with environment.write() as txn:
        txn.put(b"a", b"b", db=numbers)
    assert entries(environment) == 1
    environment.close()
    assert checks == []
    change_marker(path, clean=False)
    again = open_environment(path)
    assert entries(again) == 1
    assert checks == [path / "data.mdb"]
    again.close()


# -------------------------------------------------------------------------------------- by whom


def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Another program takes the place of the check."""
    script = tmp_path / "stand_in.py"
    script.write_text(code)
    monkeypatch.setattr(checking, "__file__", str(script))


def test_a_child_walks_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)

    def never(_: Path) -> str | None:
        raise AssertionError("walked in this process")

    monkeypatch.setattr(checking, "check", never)
    assert checking.find_damage(tmp_path / "data.mdb") is None
    content = bytearray((tmp_path / "data.mdb").read_bytes())
    content[2 * 4096 + 8 : 2 * 4096 + 16] = b"\xff" * 8
    (tmp_path / "data.mdb").write_bytes(content)
    problem = checking.find_damage(tmp_path / "data.mdb")
    print(problem)
    assert problem is not None
    assert "problems" in problem


def test_the_child_needs_neither_numpy_nor_torch() -> None:
    code = f"import sys, runpy; runpy.run_path({checking.__file__!r}); print(*sys.modules)"
    child = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(child.stdout.split())
    assert "lmdb" in loaded
    assert not {"numpy", "torch", "tiered_kv"} & loaded


def test_the_child_tells_errors_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        checking.find_damage(tmp_path)


def damaged_marker(tmp_path: Path) -> Path:
    """A directory whose file is to be checked."""
    fill(tmp_path / "tier")
    os.utime(tmp_path / "tier" / "data.mdb")
    return tmp_path / "tier"


def test_a_check_that_is_killed_leaves_all_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged_marker(tmp_path)
    stand_in(monkeypatch, tmp_path, "import os; os.kill(os.getpid(), 9)")
    for writable in (True, False):
        with pytest.raises(TierError, match=r"whole is not known.*killed by signal 9"):
            open_environment(path, writable=writable)
    monkeypatch.undo()
    environment = open_environment(path)
    assert entries(environment) == 200
    environment.close()


def test_a_check_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damaged_marker(tmp_path)
    stand_in(monkeypatch, tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(checking, "_LEAST_SECONDS", 0.2)
    with pytest.raises(TierError, match=r"whole is not known.*has not ended"):
        open_environment(path)
    monkeypatch.undo()
    environment = open_environment(path)
    assert entries(environment) == 200
    environment.close()


@pytest.mark.parametrize(
    "code", ["raise SystemExit('no lmdb here')", "print('hello')", "print('{}')", "print('[1]')"]
)
def test_a_child_that_does_not_answer_is_replaced_by_a_walk_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    path = damaged_marker(tmp_path)
    stand_in(monkeypatch, tmp_path, code)
    with caplog.at_level(logging.WARNING):
        environment = open_environment(path)
    assert entries(environment) == 200
    assert "checked in this process" in caplog.text
    environment.close()


def test_where_no_child_can_be_started_the_walk_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = damaged_marker(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with caplog.at_level(logging.WARNING):
        environment = open_environment(path)
    assert entries(environment) == 200
    assert "no child could be started" in caplog.text
    environment.close()


# ------------------------------------------------------------------- a file that is replaced


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bool], BlockIndex]:
    geometry = StoreArguments(tmp_path).geometry

    def open_index(writable: bool) -> BlockIndex:
        environment = open_environment(tmp_path / "tier", writable=writable)
        return BlockIndex(environment, NAMESPACE, geometry)

    return open_index


def test_who_only_reads_learns_that_the_file_was_replaced(
    tmp_path: Path, opened: Callable[[bool], BlockIndex]
) -> None:
    """A tier with `access: read` keeps nobody from emptying the directory."""
    opened(True)._environment.close()
    reader = opened(False)
    cursor = reader.changes(None).cursor
    assert not reader.changes(cursor).restart
    replace = "import os\nfor n in ('data.mdb', 'lock.mdb'): os.unlink(sys.argv[1] + '/' + n)\n"
    child = run_child(replace + HOLD, tmp_path / "tier")
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(TierError, match="removed or replaced"):
        reader.changes(cursor)
    # Whoever opens it anew, in the same process, follows the new file.
    environment = open_environment(tmp_path / "tier", writable=False)
    assert environment is not reader._environment
    assert entries(environment) == 1
    reader._environment.close()
    assert entries(environment) == 1
    assert open_environment(tmp_path / "tier", writable=False) is environment
    environment.close()
    environment.close()
    child.communicate("go\n")


def test_who_writes_learns_that_the_file_was_removed(
    tmp_path: Path, opened: Callable[[bool], BlockIndex]
) -> None:
    writer = opened(True)
    (tmp_path / "tier" / "data.mdb").unlink()
    with pytest.raises(TierError, match="removed or replaced"):
        writer.changes(None)
    with pytest.raises(TierError, match="was deleted while other processes use it"):
        opened(True)
    writer._environment.close()
    opened(True)._environment.close()
