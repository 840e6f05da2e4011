"""What was stored is found after SIGKILL, though the engine took no further step: publishing needs
none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.idle_worker import BLOCKS, FINGERPRINT, TIERS, Rank, assembly_of, names
from tiered_kv.connector.assembly import Assembly
from tiered_kv.errors import TieredKVError
from tiered_kv.values import CacheGeometry, GroupGeometry

PATIENCE = 60.0
SECONDS = 20.0
"""By when what was stored is to be found; what is written takes a small part of it."""


def stored_by(until: float, assembly: Assembly, tier: str) -> int:
    """How many of the blocks the scheduler's process would find; asked again and again, since the
    store tells other processes by what it holds alone."""
    geometry = CacheGeometry((GroupGeometry(0, 40_960, 1, 16),), 0, 1)
    there = 0
    while there < BLOCKS and time.monotonic() < until:
        time.sleep(0.02)
        try:
            store = assembly.open_store(tier, geometry, FINGERPRINT, writable=False)
        except TieredKVError:  # the other process is about to make it
            continue
        there = sum(store.contains(names()))
        store.close()
    return there


@pytest.mark.parametrize("host", [True, False], ids=["host-tier", "no-host-tier"])
def test_f53_what_was_stored_before_an_idle_time_is_found_after_a_kill(
    host: bool, tmp_path: Path
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.faults.idle_worker", str(tmp_path), str(host)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "the step is over\n"
        assembly, until = assembly_of(tmp_path, host=host), time.monotonic() + SECONDS
        seen = {tier: stored_by(until, assembly, tier) for tier in TIERS}
    finally:
        child.kill()
        child.communicate(timeout=PATIENCE)
    print(f"blocks found while the engine is idle: {seen}")
    assert seen == dict.fromkeys(TIERS, BLOCKS)

    rank = Rank(tmp_path, host=host)
    try:
        until = time.monotonic() + PATIENCE
        while not all(rank.worker.engine.health()[tier][0] for tier in TIERS):
            assert time.monotonic() < until, rank.worker.engine.health()
            time.sleep(0.02)
        originals = [rank.held(block) for block in range(BLOCKS)]
        for number, tier in enumerate(TIERS, 1):
            job = rank.load(number, tier, BLOCKS * number)
            rank.worker.engine.submit(job)
            assert not rank.worker.engine.wait([job.id], PATIENCE)
            [result] = rank.worker.engine.finished()
            assert result.ok, result
            arrived = [rank.held(BLOCKS * number + i) for i in range(BLOCKS)]
            assert arrived == originals, tier
        print(f"after the kill: {2 * BLOCKS} blocks loaded, bit for bit")
    finally:
        rank.worker.shutdown()
