"""F26: a pool that the machine, its control group or a limit has no memory for is refused, with the
terms of the sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.host_pages_rig import STAT, child, control_group, write
from tiered_kv.config import GIB, MIB
from tiered_kv.config.host_memory import host_memory
from tiered_kv.errors import ConfigError
from tiered_kv.memory import HostBlockPool, pool


def test_f26_the_limit_of_address_space() -> None:
    """Mapping is refused, and the limit is named."""
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


def test_f26_a_pool_beyond_the_machine_is_refused_with_the_sum() -> None:
    """Mapping alone would be granted, and the process killed later."""
    slots = host_memory().free_bytes // GIB + 64
    with pytest.raises(ConfigError) as caught:
        HostBlockPool(slots, 2, GIB)
    text = str(caught.value)
    assert f"{(slots + 2) * GIB:,} bytes" in text
    assert f"{slots:,} host slots + 2 staging slots, of {GIB:,} bytes each" in text
    assert " left: " in text
    assert "Lower the capacity of the cpu tier" in text


def test_f26_a_pool_beyond_its_control_group_is_refused_with_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
