"""The pages of the host block pool: resident, huge, registered, checked before, gone after."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.unit.host_pages_rig import (
    PATIENCE,
    SLOT,
    STAT_V1,
    Driver,
    address,
    child,
    control_group,
    grown,
    small_chunks,
    write,
)
from tiered_kv.config import GIB, MIB
from tiered_kv.config.host_memory import MemoryRoom, host_memory, memory_rooms
from tiered_kv.memory import HostBlockPool, pages
from tiered_kv.values import PAGE_BYTES

__all__ = ["small_chunks"]


class TestResidence:
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
        rooms = memory_rooms()
        print(rooms)
        assert rooms[0].free_bytes > 0
        assert host_memory().place in {room.place for room in rooms}

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
