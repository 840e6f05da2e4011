"""F25: the host pool takes what it was given and no more, is pinned in chunks, and works where that
is refused."""

from __future__ import annotations

import logging

import pytest

from tests.unit.host_pages_rig import SLOT, Driver, address, child, grown, small_chunks
from tiered_kv.config import MIB
from tiered_kv.memory import HostBlockPool

__all__ = ["small_chunks"]


def test_f25_resident_memory_is_what_was_asked_for() -> None:
    """No doubling, after the start and when growth is over."""
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


@pytest.mark.usefixtures("small_chunks")
def test_f25_every_byte_is_registered_once_in_whole_slots_staging_first() -> None:
    """Exact sizes, no slot in two chunks."""
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


@pytest.mark.usefixtures("small_chunks")
def test_f25_a_refusal_makes_the_pool_pageable_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
def test_f25_the_limit_of_locked_memory(limit: int, pinned: bool) -> None:
    """With memory that the kernel really locks."""
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
