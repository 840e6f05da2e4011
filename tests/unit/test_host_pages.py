"""The pages of the host block pool: resident, huge, registered, checked before, gone after."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.config import GIB, MIB
from tiered_kv.config.host_memory import MemoryRoom, host_memory, memory_rooms
from tiered_kv.errors import ConfigError
from tiered_kv.memory import HostBlockPool, PageState, pages, pool
from tiered_kv.values import PAGE_BYTES

PATIENCE = 30.0
SLOT = 64 * 1024

CHILD = """
import ctypes, json, os, resource, sys
from pathlib import Path
from tiered_kv.errors import ConfigError
from tiered_kv.memory import HostBlockPool

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

def areas(pool):
    "Fields of the kernel's list that lie in the pool."
    first = pool.as_array(0).ctypes.data
    end = first + pool.slots * pool.slot_bytes
    inside, found = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, stop = (int(part, 16) for part in name.split("-"))
            inside = start < end and stop > first
            if inside:
                found.append({"bytes": stop - start, "permissions": rest.split()[0]})
        elif inside:
            found[-1][name[:-1]] = rest.split()
    return found

def say(**values):
    print(json.dumps(values), flush=True)
"""


def child(code: str) -> dict[str, Any]:
    """What the code says, in a fresh process."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD + code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout)
    print(said, ran.stderr)
    return {**said, "stderr": ran.stderr}


class Driver:
    """Stands for a device's driver: notes what is registered, and refuses what it is told to."""

    def __init__(self, *, refuse_from: int | None = None) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.calls = 0
        self._refuse_from = refuse_from

    def register(self, address: int, nbytes: int) -> None:
        self.calls += 1
        if self._refuse_from is not None and self.calls >= self._refuse_from:
            raise MemoryError("out of host memory (code 2)")
        self.registered.append((address, nbytes))

    def unregister(self, address: int) -> None:
        self.unregistered.append(address)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 slots instead of 256 MiB."""
    monkeypatch.setattr(pool, "CHUNK_BYTES", 16 * SLOT)
    monkeypatch.setattr(pool, "START_BYTES", 16 * SLOT)


def address(made: HostBlockPool, number: int) -> int:
    return int(made.as_array(number).ctypes.data)


def grown(made: HostBlockPool) -> PageState:
    said: list[PageState] = []
    made.grow(said.append)
    assert made.wait_grown(PATIENCE)
    [state] = said
    return state


class TestResidence:
    def test_resident_memory_is_what_was_asked_for(self) -> None:
        """F25: no doubling, after the start and when growth is over."""
        asked = 413 * MIB
        said = child(
            "before = resident()\n"
            f"pool = HostBlockPool(400, 13, {MIB})\n"
            "start = resident() - before\n"
            "pool.grow()\n"
            "assert pool.wait_grown(60)\n"
            "say(start=start, grown=resident() - before)\n"
        )
        assert 256 * MIB <= said["start"] <= 256 * MIB + asked * 0.02
        assert asked <= said["grown"] <= asked * 1.02

    def test_what_is_said_of_huge_pages_is_what_the_kernel_lists(self) -> None:
        said = child(
            f"pool = HostBlockPool(300, 3, {MIB})\n"
            "pool.grow()\n"
            "assert pool.wait_grown(60)\n"
            "s = pool.state()\n"
            "say(areas=areas(pool), huge=s.huge_bytes, pages=s.pages, prefault=s.prefault)\n"
        )
        [area] = said["areas"]
        assert area["permissions"] == "rw-p"
        assert int(area["Rss"][0]) * 1024 == 303 * MIB
        assert {"hg", "dc"} <= set(area["VmFlags"]), "huge pages asked for; not for children"
        listed = int(area["AnonHugePages"][0]) * 1024
        assert said["huge"] == listed
        assert said["pages"].startswith("huge (" if listed else "base (")
        assert said["prefault"] == "303MiB of 303MiB"

    def test_the_first_part_is_ready_and_the_rest_can_be_used(self, small_chunks: None) -> None:
        made = HostBlockPool(60, 5, SLOT)
        assert made.state().prefaulted_bytes == 16 * SLOT
        for number in range(made.slots):
            made.as_array(number)[:] = number + 1
        assert made.state().prefaulted_bytes == 16 * SLOT
        assert grown(made).prefaulted_bytes == 65 * SLOT
        found = [set(made.as_array(number).tolist()) for number in range(made.slots)]
        assert found == [{number + 1} for number in range(made.slots)], "growth changes no byte"
        made.grow(lambda _: pytest.fail("it is grown"))
        assert made.close()

    def test_a_pool_may_be_smaller_or_its_slots_larger_than_a_chunk(
        self, small_chunks: None
    ) -> None:
        small = HostBlockPool(1, 1, PAGE_BYTES)
        assert small.state().prefaulted_bytes == 2 * PAGE_BYTES
        assert small.modes()["pages"].startswith("base (")
        large = HostBlockPool(3, 2, 20 * SLOT)
        assert large.state().prefaulted_bytes == 0
        assert [large.chunk_of(number) for number in range(5)] == [2, 3, 4, 0, 1]
        assert grown(large).prefaulted_bytes == 100 * SLOT

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
    def test_a_kernel_that_can_not_prefault(
        self,
        number: int,
        small_chunks: None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """F27: the memory works, and comes at first use; the driver registers it all the same."""
        asked = refuse(monkeypatch, pages.MADV_POPULATE_WRITE, number)
        driver = Driver()
        made = HostBlockPool(40, 0, SLOT, register=driver.register)
        state = grown(made)
        assert asked == [pages.MADV_POPULATE_WRITE], "asked once"
        assert (state.prefaulted_bytes, state.huge_bytes) == (0, 0)
        assert f"can't prefault: {os.strerror(number)}" in state.prefault
        assert made.pinned
        assert not caplog.records
        made.as_array(39)[:] = 7
        assert int(made.as_array(39).min()) == 7
        assert made.close()

    def test_a_kernel_without_huge_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """F27."""
        import mmap

        asked = refuse(monkeypatch, mmap.MADV_HUGEPAGE, errno.EINVAL)
        made = HostBlockPool(64, 0, SLOT)
        assert made.modes()["pages"] == "base (this kernel has no huge pages: Invalid argument)"
        assert asked == [mmap.MADV_HUGEPAGE]
        assert made.state().prefaulted_bytes == 64 * SLOT
        assert made.state().huge_bytes == 0

    def test_a_machine_that_runs_out_says_so_once(
        self,
        small_chunks: None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        driver = Driver()
        made = HostBlockPool(64, 0, SLOT, register=driver.register)
        refuse(monkeypatch, pages.MADV_POPULATE_WRITE, errno.ENOMEM)
        state = grown(made)
        [record] = caplog.records
        assert "1MiB of 4MiB resident" in record.getMessage()
        assert "lower the capacity" in record.getMessage()
        assert state.prefault.startswith("1MiB of 4MiB (stopped: Cannot allocate memory")
        assert (driver.calls, made.pinned) == (1, False)

    def test_the_kernel_itself_refuses_advice_that_it_does_not_know(self) -> None:
        made = HostBlockPool(1, 0, PAGE_BYTES)
        with pytest.raises(OSError, match="Invalid argument"):
            pages.advise(address(made, 0), PAGE_BYTES, 9999)


def refuse(monkeypatch: pytest.MonkeyPatch, advice: int, number: int) -> list[int]:
    """Have the kernel refuse one advice; gives how often it was asked for it."""
    asked: list[int] = []

    def stub(at: int, nbytes: int, given: int) -> None:
        if given == advice:
            asked.append(given)
            raise OSError(number, os.strerror(number))
        real(at, nbytes, given)

    real = pages.advise
    monkeypatch.setattr(pages, "advise", stub)
    return asked


@pytest.mark.usefixtures("small_chunks")
class TestRegistration:
    def test_every_byte_is_registered_once_in_whole_slots_staging_first(self) -> None:
        """F25: exact sizes, no slot in two chunks."""
        driver = Driver()
        made = HostBlockPool(70, 5, SLOT, register=driver.register, unregister=driver.unregister)
        assert driver.registered == [
            (address(made, 70), 5 * SLOT),
            (address(made, 0), 11 * SLOT),
        ]
        pinned = [number for number in range(75) if made.pinned_slot(number)]
        assert pinned == [*range(11), *range(70, 75)]
        assert made.modes()["memory"] == "pageable, being pinned (1MiB of 4.688MiB)"
        assert made.state().pinned_bytes == 16 * SLOT
        state = grown(made)
        assert made.pinned
        assert (state.memory, state.pinned_bytes) == ("pinned", 75 * SLOT)
        ends = address(made, 0)
        for start, nbytes in sorted(driver.registered):
            assert start == ends
            assert nbytes % SLOT == 0
            assert nbytes <= 16 * SLOT
            ends += nbytes
        assert ends == address(made, 74) + SLOT
        starts = {start for start, _ in driver.registered}
        for number in range(1, 75):
            parted = made.chunk_of(number) != made.chunk_of(number - 1)
            assert parted == (address(made, number) in starts)
        with pytest.raises(ValueError, match="outside the pool"):
            made.pinned_slot(75)
        assert made.close()
        assert sorted(driver.unregistered) == sorted(starts)
        assert made.close()
        assert len(driver.unregistered) == len(starts), "each once"

    def test_a_refusal_makes_the_pool_pageable_with_one_line(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """F25."""
        driver = Driver(refuse_from=3)
        made = HostBlockPool(64, 0, SLOT, register=driver.register, unregister=driver.unregister)
        state = grown(made)
        assert not made.pinned
        assert driver.calls == 3, "not asked again"
        assert made.pinned_slot(0), "what the driver took, it keeps: it may be copying"
        assert not made.pinned_slot(63)
        assert state.prefaulted_bytes == 64 * SLOT
        reason = "out of host memory (code 2)"
        assert state.memory == f"pageable (registering it was refused: {reason})"
        assert state.pinned_bytes == 32 * SLOT
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        for part in (reason, "ulimit -l", "1MiB after 2MiB"):
            assert part in record.getMessage()
        assert made.close()
        assert sorted(driver.unregistered) == sorted(start for start, _ in driver.registered)

    def test_without_a_device_nothing_is_pinned(self) -> None:
        made = HostBlockPool(4, 0, SLOT)
        assert made.modes()["memory"] == "pageable (no device asks for pinned memory)"
        assert not made.pinned
        assert not made.pinned_slot(0)

    def test_closing_ends_growth(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, go_on = threading.Event(), threading.Event()
        driver = Driver()

        def register(at: int, nbytes: int) -> None:
            if driver.calls == 2:
                begun.set()
                assert go_on.wait(PATIENCE)
            driver.register(at, nbytes)

        made = HostBlockPool(96, 0, SLOT, register=register, unregister=driver.unregister)
        made.grow(lambda _: pytest.fail("it was closed before it had grown"))
        assert begun.wait(PATIENCE)
        monkeypatch.setattr(pages, "CLOSE_SECONDS", 0.0)
        assert made.close() is False, "the driver has not answered"
        go_on.set()
        monkeypatch.undo()
        assert made.close() is True
        assert driver.calls == 3, "of 6 chunks"
        assert len(driver.unregistered) == 3
        assert not made.wait_grown(0)
        made.grow(lambda _: pytest.fail("it is closed"))

    def test_a_driver_that_does_not_unregister_holds_up_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def unregister(at: int) -> None:
            raise RuntimeError("no such registration")

        made = HostBlockPool(4, 0, SLOT, register=Driver().register, unregister=unregister)
        assert made.close() is True
        assert "no such registration" in caplog.text


LOCK = """
libc = ctypes.CDLL(None, use_errno=True)
libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

def register(address, nbytes):
    "Pins for real, against the limit of locked memory."
    if libc.mlock(address, nbytes):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

import logging
logging.basicConfig()
HostBlockPool(1, 0, 4096).close()  # nothing is imported any more after this
resource.setrlimit(resource.RLIMIT_MEMLOCK, (MOST, MOST))
if os.getuid() == 0:
    os.setuid(65534)  # root is not bound by the limit
pool = HostBlockPool(50, 2, 65536, register=register)
say(pinned=pool.pinned, locked=status("VmLck"), memory=pool.modes()["memory"])
"""


@pytest.mark.parametrize(("limit", "pinned"), [(MIB, False), (4 * MIB, True)])
def test_the_limit_of_locked_memory(limit: int, pinned: bool) -> None:
    """F25, with memory that the kernel really locks."""
    said = child(LOCK.replace("MOST", str(limit)))
    assert said["pinned"] is pinned
    if pinned:
        assert said["locked"] == 52 * SLOT
        assert said["memory"] == "pinned"
        assert not said["stderr"]
    else:
        assert said["locked"] == 2 * SLOT, "staging is taken first"
        assert "Cannot allocate memory" in said["memory"]
        [line] = said["stderr"].splitlines()
        assert f"limited to {limit} bytes (1MiB; ulimit -l)" in line
        assert "LimitMEMLOCK=infinity" in line


def test_the_limit_of_address_space() -> None:
    """F26: mapping is refused, and the limit is named."""
    said = child(
        "used = status('VmSize')\n"
        "limit = used + (64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n"
        "    HostBlockPool(256, 0, 1 << 20)\n"
        "except ConfigError as error:\n"
        "    say(error=str(error))\n"
    )
    for part in ("268,435,456 bytes (256MiB)", "ulimit -v", " used", "capacity of the cpu tier"):
        assert part in said["error"]


def test_a_pool_beyond_the_machine_is_refused_with_the_sum() -> None:
    """F26: mapping alone would be granted, and the process killed later."""
    slots = host_memory().free_bytes // GIB + 64
    with pytest.raises(ConfigError) as caught:
        HostBlockPool(slots, 2, GIB)
    text = str(caught.value)
    assert f"{(slots + 2) * GIB:,} bytes" in text
    assert f"{slots:,} host slots + 2 staging slots, of {GIB:,} bytes each" in text
    assert " left: " in text
    assert "Lower the capacity of the cpu tier" in text


def test_a_pool_beyond_its_control_group_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F26."""
    group = control_group(tmp_path, version=2)
    write(group, {"memory.max": 64 * MIB, "memory.current": 60 * MIB, "memory.stat": STAT})
    monkeypatch.setattr(pool, "host_memory", lambda: host_memory(tmp_path))
    HostBlockPool(6, 0, MIB).close()
    with pytest.raises(ConfigError) as caught:
        HostBlockPool(6, 1, MIB)
    for part in (
        "the control group /serving/box (memory.max) has 6,291,456 bytes (6MiB) left",
        "limit 67,108,864 bytes (64MiB) - in use 62,914,560 bytes (60MiB)",
        " + file cache 2,097,152 bytes (2MiB)",
    ):
        assert part in str(caught.value)


STAT = f"anon 4096\nactive_file {MIB}\ninactive_file {MIB}\nshmem 77\n"
STAT_V1 = f"active_file 1\ntotal_active_file {MIB}\ntotal_inactive_file {MIB}\n"


def control_group(root: Path, *, version: int, namespace: str = "/") -> Path:
    """The files of a machine with 1 GiB, whose process is in /serving/box; the folder of the group.
    `namespace` is what the mount shows of the hierarchy."""
    proc = root / "proc" / "self"
    proc.mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  1048576 kB\n")
    if version == 2:
        (proc / "cgroup").write_text("0::/serving/box\n")
        mount, kind, options = "/sys/fs/cgroup", "cgroup2", "rw"
    else:
        (proc / "cgroup").write_text("7:cpu:/elsewhere\n4:blkio,memory:/serving/box\n0::/\n")
        mount, kind, options = "/sys/fs/cgroup/memory", "cgroup", "rw,memory"
    (proc / "mountinfo").write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n"
        "30 22 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        f"35 22 0:32 {namespace} {mount} rw,relatime shared:9 - {kind} {kind} {options}\n"
    )
    seen = "serving/box".removeprefix(namespace.strip("/")).strip("/")
    group = root / mount.lstrip("/") / seen
    group.mkdir(parents=True)
    return group


def write(folder: Path, files: dict[str, int | str]) -> None:
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


class TestRoom:
    def test_version_2_and_the_groups_above(self, tmp_path: Path) -> None:
        group = control_group(tmp_path, version=2)
        write(group, {"memory.max": "max", "memory.current": 0})
        write(group.parent, {"memory.max": 50 * MIB, "memory.current": 10 * MIB})
        machine, above = memory_rooms(tmp_path)
        assert machine == MemoryRoom("host memory", GIB, "MemAvailable of /proc/meminfo")
        assert (above.place, above.free_bytes) == (
            "the control group /serving (memory.max)",
            40 * MIB,
        )
        assert host_memory(tmp_path) == above

    def test_version_1(self, tmp_path: Path) -> None:
        group = control_group(tmp_path, version=1)
        write(group.parent.parent, {"memory.limit_in_bytes": 9223372036854771712})
        write(group.parent.parent, {"memory.usage_in_bytes": GIB})
        files = {"memory.limit_in_bytes": 30 * MIB, "memory.usage_in_bytes": 29 * MIB}
        write(group, {**files, "memory.stat": STAT_V1})
        _, room = memory_rooms(tmp_path)
        assert room.place == "the control group /serving/box (memory.limit_in_bytes)"
        assert room.free_bytes == 3 * MIB

    def test_a_group_that_is_mounted_from_its_own_folder_on(self, tmp_path: Path) -> None:
        group = control_group(tmp_path, version=2, namespace="/serving/box")
        write(group, {"memory.max": 5 * MIB, "memory.current": 6 * MIB})
        _, room = memory_rooms(tmp_path)
        assert room.place == "the control group / (memory.max)"
        assert room.free_bytes == 0

    def test_this_machine(self) -> None:
        machine, *groups = memory_rooms()
        print(machine, groups)
        assert machine.free_bytes > 0
        assert host_memory().free_bytes <= machine.free_bytes

    def test_a_machine_that_shows_nothing_bounds_by_its_free_pages(self, tmp_path: Path) -> None:
        [machine] = memory_rooms(tmp_path)
        assert machine.terms == "free pages"
        assert machine.free_bytes > 0


@pytest.mark.faults
def test_killed_again_and_again_it_leaves_nothing_behind() -> None:
    """F24: no file and no shared memory, whether growth is over or not."""
    code = (
        "import sys, time\n"
        "from tiered_kv.memory import HostBlockPool\n"
        f"pool = HostBlockPool(512, 0, {MIB})\n"
        "for i in range(64): pool.as_array(i)[:] = 1\n"
        "pool.grow()\n"
        "print('growing', flush=True)\n"
        "time.sleep(60)\n"
    )
    before = shared_bytes()
    private = 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline() == b"growing\n"
            maps = Path(f"/proc/{killed.pid}/maps").read_text().splitlines()
            killed.send_signal(signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
        sizes = {"p": 0, "s": 0}
        for line in maps:
            span, permissions = line.split()[:2]
            start, end = (int(part, 16) for part in span.split("-"))
            sizes[permissions[-1]] += end - start
        assert sizes["s"] < MIB, "shared memory could outlive the process"
        private += sizes["p"]
    grew = shared_bytes() - before
    print(f"killed 5 times with {private:,} private bytes mapped; shared memory grew by {grew:,}")
    assert private > 5 * 512 * MIB
    assert grew < 512 * MIB


def shared_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no Shmem")


def test_threads_write_while_it_grows() -> None:
    """Growth and use of the same pages meet: nothing is lost."""
    made = HostBlockPool(96 * 4, 0, MIB)
    start = threading.Barrier(3)
    failed: list[int] = []

    def work(numbers: range) -> None:
        start.wait()
        for number in numbers:
            made.as_array(number)[:] = number % 251
        failed.extend(n for n in numbers if not np.all(made.as_array(n) == n % 251))

    workers = [threading.Thread(target=work, args=(range(i, 384, 2),)) for i in range(2)]
    for worker in workers:
        worker.start()
    start.wait()
    state = grown(made)
    for worker in workers:
        worker.join(PATIENCE)
    print(f"wrote 384 slots while {state.prefaulted_bytes:,} bytes became resident")
    assert not failed
    assert state.prefaulted_bytes == 384 * MIB
    assert made.close()
