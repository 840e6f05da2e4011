from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import lmdb
import pytest

from tiered_kv.errors import (
    FormatError,
    IdentityError,
    NoSpace,
    TierError,
    TierGone,
)
from tiered_kv.index import Emptied, Environment, Owner, Owners, directory, vetting
from tiered_kv.index.environment import Durability
from tiered_kv.values import FORMAT_VERSION

MIB = 2**20


def open_environment(
    path: Path,
    *,
    kind: str = "lmdb",
    max_bytes: int = 4 * MIB,
    writable: bool = True,
    durability: Durability = "none",
    force: bool = False,
    on_empty: Callable[[Emptied], None] | None = None,
) -> Environment:
    return Environment.open(
        path,
        kind=kind,
        tier="pins",
        max_bytes=max_bytes,
        writable=writable,
        durability=durability,
        force=force,
        on_empty=on_empty,
    )


def fill(path: Path, count: int = 200) -> bytes:
    """Write some rows, close cleanly; the environment's identity."""
    environment = open_environment(path)
    numbers = environment.database("numbers")
    with environment.write() as txn:
        for number in range(count):
            txn.put(number.to_bytes(4, "big"), bytes(100), db=numbers)
    environment.close()
    return environment.identity


def entries(environment: Environment) -> int:
    numbers = environment.database("numbers")
    with environment.read() as txn:
        return txn.stat(numbers)["entries"]


def change_marker(path: Path, **fields: object) -> None:
    marker = path / directory.MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | fields))


def run_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Another Python that imports this module as `t`."""
    prelude = (
        "import sys; from pathlib import Path; import tests.stores.test_index_environment as t\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


HOLD = """
e = t.open_environment(Path(sys.argv[1]))
n = e.database("numbers")
with e.write() as txn: txn.put(b"held", b"1", db=n)
print("open", flush=True)
sys.stdin.readline()
e.close()
"""


# ------------------------------------------------------------------------------- open and share


def test_one_environment_per_directory_and_process(tmp_path: Path) -> None:
    one = open_environment(tmp_path / "tier")
    (tmp_path / "link").symlink_to(tmp_path / "tier")
    two = open_environment(tmp_path / "link")
    assert two is one
    one.close()
    assert entries(two) == 0
    two.close()
    two.close()
    with pytest.raises(TierError, match="closed"), two.read():
        pass


def test_files_are_private_and_the_mark_is_set(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    environment = open_environment(path)
    assert json.loads((path / directory.MARKER).read_text())["clean"] is False
    environment.close()
    assert json.loads((path / directory.MARKER).read_text())["clean"] is True
    for file in (tmp_path / "a", path):
        assert stat.S_IMODE(file.stat().st_mode) == 0o700
    names = {file.name for file in path.iterdir()}
    assert names == {"data.mdb", "lock.mdb", "tiered-kv.json", "users.lock", "turn.lock"}
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_contents_and_identity_survive_a_clean_close(tmp_path: Path) -> None:
    emptied: list[Emptied] = []
    identity = fill(tmp_path)
    environment = open_environment(tmp_path, on_empty=emptied.append)
    assert (entries(environment), environment.identity) == (200, identity)
    assert emptied == []
    assert environment.modes() == {
        "lmdb": "0.9.36",
        "durability": "none",
        "writemap": "off",
        "access": "read_write",
        "reader_locks": "on",
    }
    environment.close()


def test_the_version_of_lmdb_is_pinned_against_the_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDB_DEFAULT_LIB_VERSION", "1")
    child = run_child(
        "import lmdb; print(lmdb.version(), t.open_environment(Path(sys.argv[1])).modes()['lmdb'])",
        tmp_path,
    )
    assert child.communicate()[0].endswith(" 0.9.36\n")


@pytest.mark.parametrize("durability", ["none", "batch", "full"])
def test_each_durability_opens_and_writes(tmp_path: Path, durability: Durability) -> None:
    environment = open_environment(tmp_path, durability=durability)
    with environment.write() as txn:
        txn.put(b"a", b"b", db=environment.database("meta"))
    environment.sync()
    assert environment.modes()["durability"] == durability
    environment.close()


def test_a_child_that_was_forked_while_it_was_opened_or_closed_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of another thread may come at any moment, and its child live long."""
    children: list[int] = []
    forks = iter(range(2))

    def fork(*_: object) -> None:
        if next(forks, None) is not None:
            child = os.fork()
            if child == 0:
                try:
                    while True:
                        signal.pause()
                finally:
                    os._exit(1)
            children.append(child)

    real = vetting._map_bytes

    def map_bytes(path: Path, tier: str, most: int, own: Collection[str]) -> int:
        fork()
        return real(path, tier, most, own)

    monkeypatch.setattr(vetting, "_map_bytes", map_bytes)
    monkeypatch.setattr("tiered_kv.index.environment._OPEN_SECONDS", 0.5)
    try:
        opened = Environment.open(
            tmp_path,
            kind="lmdb",
            tier="pins",
            max_bytes=4 * MIB,
            writable=True,
            on_clean=fork,
        )
        with opened.write() as txn:
            txn.put(b"1", b"1")
        opened.close()
        assert len(children) == 2
        again = open_environment(tmp_path)
        again.close()
        assert json.loads((tmp_path / directory.MARKER).read_text())["clean"] is True
        open_environment(tmp_path, writable=False).close()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_forked_child_leaves_its_parent_the_lock(tmp_path: Path) -> None:
    environment = open_environment(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    users = os.open(tmp_path / directory.USERS, os.O_RDWR)
    assert not directory.try_lock(users, fcntl.LOCK_EX)
    environment.close()
    assert directory.try_lock(users, fcntl.LOCK_EX)
    os.close(users)


def test_a_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    environment = open_environment(tmp_path)
    numbers = environment.database("numbers")

    def fail_half_way() -> None:
        with environment.write() as txn:
            txn.put(b"a", b"b", db=numbers)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert entries(environment) == 0
    environment.close()


def test_a_write_inside_a_write_is_refused_at_once(tmp_path: Path) -> None:
    environment = open_environment(tmp_path)
    with environment.write():
        with pytest.raises(ValueError, match="already"), environment.write():
            pass
        with pytest.raises(ValueError, match="already"):
            environment.database("new")
    environment.close()


def test_closing_waits_for_a_reader_of_another_thread(tmp_path: Path) -> None:
    environment = open_environment(tmp_path)
    meta = environment.database("meta")
    reading, go_on, seen = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        with environment.read() as txn:
            reading.set()
            go_on.wait(10)
            txn.get(b"kind", db=meta)
            seen.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(10)
    closer = threading.Thread(target=environment.close)
    closer.start()
    go_on.set()
    closer.join(20)
    reader.join(20)
    assert seen.is_set()


# ---------------------------------------------------------------------------- whose directory


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos.tar").write_bytes(b"precious")
    with pytest.raises(IdentityError, match=r"photos\.tar.*empty one"):
        open_environment(tmp_path)
    (tmp_path / "photos.tar").rename(tmp_path / "data.mdb")
    with pytest.raises(IdentityError, match=r"data\.mdb"):
        open_environment(tmp_path)
    assert (tmp_path / "data.mdb").read_bytes() == b"precious"


def test_another_programs_lmdb_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    other = lmdb.open(str(tmp_path / "other"), max_dbs=2, lib_version=0)
    mails = other.open_db(b"mails")
    with other.begin(write=True) as txn:
        txn.put(b"a", b"precious", db=mails)
    other.close()
    before = (tmp_path / "other" / "data.mdb").read_bytes()
    with pytest.raises(IdentityError, match="other files"):
        open_environment(tmp_path / "other")
    fill(tmp_path / "tier")
    (tmp_path / "other" / "data.mdb").replace(tmp_path / "tier" / "data.mdb")
    with pytest.raises(IdentityError, match="meta"):
        open_environment(tmp_path / "tier")
    assert (tmp_path / "tier" / "data.mdb").read_bytes() == before


def test_a_mount_points_lost_and_found_is_not_foreign(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    open_environment(tmp_path).close()


def test_a_tier_of_another_type_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(IdentityError, match="'lmdb', not 'nvme'"):
        open_environment(tmp_path, kind="nvme")
    environment = open_environment(tmp_path)
    with pytest.raises(IdentityError, match="directory of its own"):
        open_environment(tmp_path, kind="nvme")
    environment.close()


def test_data_of_another_kind_under_our_marker_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "lmdb")
    open_environment(tmp_path / "nvme", kind="nvme").close()
    (tmp_path / "lmdb" / "data.mdb").replace(tmp_path / "nvme" / "data.mdb")
    with pytest.raises(IdentityError, match="put there from elsewhere"):
        open_environment(tmp_path / "nvme", kind="nvme")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    change_marker(tmp_path, format=FORMAT_VERSION + 1, shape="new")
    for writable in (True, False):
        told = rf"format {FORMAT_VERSION + 1}.*up to {FORMAT_VERSION}.*update"
        with pytest.raises(FormatError, match=told):
            open_environment(tmp_path, writable=writable)
    change_marker(tmp_path, format=FORMAT_VERSION)
    environment = open_environment(tmp_path)
    assert entries(environment) == 200
    environment.close()


def test_an_older_format_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    change_marker(tmp_path, format=FORMAT_VERSION - 1)
    for writable in (True, False):
        with pytest.raises(FormatError, match=rf"format {FORMAT_VERSION - 1}.*empty the directory"):
            open_environment(tmp_path, writable=writable)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", json.dumps({"format": FORMAT_VERSION}), "\x00\x01", '{"format": "x"}']
)
def test_an_unreadable_marker_is_refused(tmp_path: Path, text: str) -> None:
    fill(tmp_path)
    (tmp_path / directory.MARKER).write_text(text)
    with pytest.raises(IdentityError, match="cannot be read"):
        open_environment(tmp_path)


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="Not a directory"):
        open_environment(tmp_path / "file")


# -------------------------------------------------------------------------------- damaged data


def truncated(data: Path) -> None:
    os.truncate(data, data.stat().st_size // 2)


def emptied(data: Path) -> None:
    os.truncate(data, 0)


def garbage(data: Path) -> None:
    data.write_bytes(os.urandom(100_000))


def page_damaged(data: Path) -> None:
    content = bytearray(data.read_bytes())
    for page in range(2, len(content) // 4096):
        content[page * 4096 + 8 : page * 4096 + 16] = b"\xff" * 8
    data.write_bytes(content)


@pytest.mark.parametrize("damage", [truncated, emptied, garbage, page_damaged])
@pytest.mark.parametrize("clean", [True, False])
def test_damaged_data_is_set_aside_and_the_tier_starts_empty(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    clean: bool,
) -> None:
    identity = fill(tmp_path)
    damage(tmp_path / "data.mdb")
    change_marker(tmp_path, clean=clean)
    told: list[tuple[Emptied, bool]] = []
    with caplog.at_level(logging.WARNING):
        environment = open_environment(
            tmp_path, on_empty=lambda why: told.append((why, (tmp_path / "data.mdb").exists()))
        )
    assert told == [(Emptied.DAMAGED, False)]
    assert environment.identity != identity
    assert entries(environment) == 0
    assert (tmp_path / "data.mdb.damaged-1").exists()
    (record,) = caplog.records
    assert "starts empty" in record.message
    assert "damaged-1" in record.message
    environment.close()

    damage(tmp_path / "data.mdb")
    open_environment(tmp_path).close()
    assert [f.name for f in tmp_path.glob("*damaged*")] == ["data.mdb.damaged-2"]


def test_damaged_data_that_would_eat_the_budget_is_removed(tmp_path: Path) -> None:
    fill(tmp_path, 10_000)
    assert (tmp_path / "data.mdb").stat().st_size > MIB
    truncated(tmp_path / "data.mdb")
    open_environment(tmp_path, max_bytes=2 * MIB).close()
    assert list(tmp_path.glob("*damaged*")) == []


def test_damaged_data_is_left_alone_by_a_read_only_tier(tmp_path: Path) -> None:
    fill(tmp_path)
    garbage(tmp_path / "data.mdb")
    before = (tmp_path / "data.mdb").read_bytes()
    with pytest.raises(TierError, match="damaged"):
        open_environment(tmp_path, writable=False)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_an_empty_callback_that_fails_is_called_again(tmp_path: Path) -> None:
    def fail(reason: Emptied) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(TierError, match="Input/output"):
        open_environment(tmp_path, on_empty=fail)
    told: list[Emptied] = []
    open_environment(tmp_path, on_empty=told.append).close()
    assert told == [Emptied.MISSING]


# ------------------------------------------------------------------- crash of process, machine


def test_a_crash_of_the_machine_empties_what_was_not_flushed(tmp_path: Path) -> None:
    fill(tmp_path)
    change_marker(tmp_path, clean=False, boot_id="0" * 32)
    told: list[Emptied] = []
    environment = open_environment(tmp_path, on_empty=told.append)
    assert told == [Emptied.CRASHED]
    assert entries(environment) == 0
    environment.close()


def test_after_a_crash_of_the_machine_missing_data_is_no_smaller_loss(tmp_path: Path) -> None:
    """What lies beside it is as little to be trusted as if `data.mdb` were there; also when the
    store could not drop it at first."""
    fill(tmp_path)
    change_marker(tmp_path, clean=False, boot_id="0" * 32)
    (tmp_path / "data.mdb").unlink()

    def fail(reason: Emptied) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(TierError, match="Input/output"):
        open_environment(tmp_path, on_empty=fail)
    told: list[Emptied] = []
    open_environment(tmp_path, on_empty=told.append).close()
    assert told == [Emptied.CRASHED]


@pytest.mark.parametrize("durability", ["batch", "full"])
def test_a_crash_of_the_machine_keeps_what_was_flushed(tmp_path: Path, durability: str) -> None:
    fill(tmp_path)
    change_marker(tmp_path, clean=False, boot_id="0" * 32, durability=durability)
    environment = open_environment(tmp_path)
    assert entries(environment) == 200
    environment.close()


def test_a_restart_of_the_machine_after_a_clean_close_keeps_all(tmp_path: Path) -> None:
    fill(tmp_path)
    change_marker(tmp_path, boot_id="0" * 32)
    environment = open_environment(tmp_path)
    assert entries(environment) == 200
    environment.close()


def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    child = run_child(HOLD, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert json.loads((tmp_path / directory.MARKER).read_text())["clean"] is False
    environment = open_environment(tmp_path)
    assert entries(environment) == 1
    environment.close()


def test_the_mark_is_set_by_the_last_process(tmp_path: Path) -> None:
    child = run_child(HOLD, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    environment = open_environment(tmp_path)
    assert entries(environment) == 1
    environment.close()
    assert json.loads((tmp_path / directory.MARKER).read_text())["clean"] is False
    child.communicate("go\n")
    assert json.loads((tmp_path / directory.MARKER).read_text())["clean"] is True


def test_another_process_is_never_robbed_of_its_data(tmp_path: Path) -> None:
    """While somebody has it open nothing is judged, set aside or emptied."""
    child = run_child(HOLD, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    change_marker(tmp_path, boot_id="0" * 32)
    told: list[Emptied] = []
    environment = open_environment(tmp_path, on_empty=told.append)
    assert entries(environment) == 1
    assert told == []
    environment.close()
    (tmp_path / "data.mdb").unlink()
    with pytest.raises(TierError, match="deleted while other processes use it"):
        open_environment(tmp_path, on_empty=told.append)
    assert told == []
    child.communicate("go\n")


def test_a_map_that_another_process_enlarged_is_adopted(tmp_path: Path) -> None:
    small = open_environment(tmp_path, max_bytes=MIB)
    child = run_child(
        """
e = t.open_environment(Path(sys.argv[1]), max_bytes=8 * 2**20)
n = e.database("numbers")
with e.write() as txn:
    for i in range(40): txn.put(i.to_bytes(4, "big"), bytes(100_000), db=n)
e.close()
""",
        tmp_path,
    )
    child.communicate()
    assert child.returncode == 0
    assert entries(small) == 40
    small.close()


def test_a_full_map_says_so(tmp_path: Path) -> None:
    environment = open_environment(tmp_path, max_bytes=MIB)
    numbers = environment.database("numbers")
    with pytest.raises(NoSpace, match="budget"), environment.write() as txn:
        txn.put(b"a", bytes(2 * MIB), db=numbers)
    with environment.write() as txn:
        txn.put(b"a", b"b", db=numbers)
    environment.close()


def test_other_files_count_against_the_budget(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "stray").write_bytes(os.urandom(MIB))
    environment = open_environment(tmp_path, max_bytes=4 * MIB)
    assert environment.map_bytes <= 3 * MIB
    environment.close()
    with pytest.raises(NoSpace, match="other files"):
        open_environment(tmp_path, max_bytes=MIB)


def test_a_smaller_budget_than_the_file_starts_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, 10_000)
    environment = open_environment(tmp_path, max_bytes=MIB)
    assert entries(environment) == 0
    assert "larger than the budget" in caplog.text
    environment.close()


# ------------------------------------------------------------------------------------ read only


def test_a_read_only_tier_shares_with_a_writer_in_its_process(tmp_path: Path) -> None:
    fill(tmp_path)
    reader = open_environment(tmp_path, writable=False)
    assert entries(reader) == 200
    with pytest.raises(ValueError, match="read-only"), reader.write():
        pass
    with pytest.raises(TierError, match="open read-only in this process"):
        open_environment(tmp_path)
    reader.close()
    writer = open_environment(tmp_path)
    assert open_environment(tmp_path, writable=False) is writer
    writer.close()
    writer.close()


def test_a_read_only_tier_needs_something_to_read(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="mounted"):
        open_environment(tmp_path / "missing", writable=False)
    with pytest.raises(TierError, match="nothing was stored"):
        open_environment(tmp_path, writable=False)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_tier_follows_a_writing_process(tmp_path: Path) -> None:
    child = run_child(HOLD, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    reader = open_environment(tmp_path, writable=False)
    assert entries(reader) == 1
    child.communicate("go\n")
    reader.close()


def test_a_read_only_file_system_is_read_without_locks(tmp_path: Path) -> None:
    fill(tmp_path)
    script = (
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path} && "
        f'exec "{sys.executable}" -c "$CODE" {tmp_path}'
    )
    code = (
        "import sys; from pathlib import Path; import tests.stores.test_index_environment as t\n"
        "e = t.open_environment(Path(sys.argv[1]), writable=False)\n"
        "print(t.entries(e), e.modes()['reader_locks']); e.close()\n"
    )
    child = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "CODE": code,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
    )
    if "unshare" in child.stderr or "mount:" in child.stderr:
        pytest.skip(f"no mount namespace here: {child.stderr.strip()}")
    assert child.stdout == "200 off\n", child.stderr


def test_owners_are_told_dead_from_alive() -> None:
    me = Owner.current()
    assert me.alive()
    assert Owner.unpack(me.pack()) == me
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = Owner(me.boot, me.pid_namespace, child.pid, me.started, me.since)
    assert not theirs.alive(), "the pid was used again by a process that started later"
    child.communicate(b"\n")
    assert not Owner(me.boot, me.pid_namespace, child.pid, me.started, me.since).alive()
    assert not Owner(bytes(16), me.pid_namespace, me.pid, me.started, me.since).alive()
    elsewhere = me.pid_namespace + 1
    assert Owner(me.boot, elsewhere, child.pid, 1, me.since).alive()
    assert not Owner(me.boot, elsewhere, child.pid, 1, me.since - 3600).alive()
    with pytest.raises(ValueError, match="bytes"):
        Owner.unpack(b"short")


def test_a_row_of_another_length_is_damage_of_the_tier(tmp_path: Path) -> None:
    environment = open_environment(tmp_path)
    database = environment.database("rows")
    with environment.write() as txn:
        txn.put(b"key", b"1234567", db=database)
    for transaction in (environment.write, environment.read):
        with (
            pytest.raises(TierError, match=r"is damaged: .*verify --repair"),
            transaction() as txn,
        ):
            struct.unpack("<Q", txn.get(b"key", db=database) or b"")
    environment.close()


def test_a_directory_that_was_deleted_is_not_shared_with_the_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems may give the number of a deleted directory to the next one that is made."""
    path = tmp_path / "index"
    fill(path, 10)
    old = open_environment(path)
    shutil.rmtree(path)
    with pytest.raises(TierGone, match="was removed or replaced"):
        old.check_current()
    assert entries(old) == 10
    path.mkdir(mode=0o700)
    number = path.stat().st_dev, path.stat().st_ino
    monkeypatch.setattr(old, "_key", number)
    monkeypatch.setitem(Environment._open, number, old)
    new = open_environment(path)
    assert new is not old
    assert entries(new) == 0
    old.close()
    marker = path / directory.MARKER
    assert not json.loads(marker.read_text())["clean"], "it is in use"
    assert open_environment(path) is new
    new.close()
    new.close()
    assert json.loads(marker.read_text())["clean"]


def test_an_empty_mount_point_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process had open on another file system is not made anew below it."""
    path = tmp_path / "disk" / "index"
    fill(path)
    monkeypatch.setitem(Environment._devices, path, path.stat().st_dev + 1)
    again = open_environment(path)  # what is there is used, wherever it lies now
    again.close()
    monkeypatch.setitem(Environment._devices, path, path.stat().st_dev + 1)
    shutil.rmtree(path)
    with pytest.raises(TierError, match="mount its disk"):
        open_environment(path)
    assert not path.exists()


def test_who_has_a_tier_open_is_told_and_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    environment = open_environment(tmp_path)
    owners = Owners(environment.database("owners"))
    me = Owner.current()
    dead = Owner(bytes(16), me.pid_namespace, me.pid, me.started, me.since)
    with environment.write() as txn:
        owners.register(txn, b"mine", b"a space!")
        owners.register(txn, b"also mine", b"another!")
        txn.put(b"theirs", dead.pack() + b"deserted", db=owners.database)
        for length in (0, 1, Owner.PACKED_BYTES, Owner.PACKED_BYTES + 7, Owner.PACKED_BYTES + 9):
            damaged = (me.pack() + b"deserted?")[:length]
            txn.put(b"damaged %d" % length, damaged, db=owners.database)
        assert owners.live_namespaces(txn) == {b"a space!", b"another!"}
        assert owners.dead(txn) == [b"theirs"]
        owners.forget(txn, b"mine")
        owners.forget(txn, b"theirs")
        assert owners.live_namespaces(txn) == {b"another!"}
        assert owners.dead(txn) == []
    environment.close()
