"""F36: twenty times its capacity goes through an lmdb tier, and its files stay as large as they
were; nothing is refused, and what is used stays. `tests.benchmarks.lmdb_churn` measures the times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.lmdb_churn import Churn, Tenth
from tests.stores.nvme_parts import MIB
from tiered_kv.errors import NoSpace
from tiered_kv.testing.conformance.blocks import disk_bytes

CAPACITY = 32 * MIB


@pytest.mark.parametrize("writemap", ["off", "auto"])
def test_f36_files_stay_flat(tmp_path: Path, writemap: str) -> None:
    churn = Churn(tmp_path / "tier", CAPACITY, writemap)
    tenths: list[Tenth] = []
    refused: list[str] = []
    try:
        tenths.extend(churn.tenths(20))
    except NoSpace as error:
        refused.append(str(error))
    for tenth in tenths:
        print(
            f"stored {tenth.stored_bytes / MIB:.0f} MiB, files {tenth.file_bytes / MIB:.1f}, "
            f"live {tenth.live_bytes / MIB:.1f}, {tenth.blocks} blocks, {tenth.evicted} evicted, "
            f"hot {tenth.hot_hits} of {tenth.hot_reads}"
        )
    print(f"refused: {refused}")
    assert (refused, len(tenths)) == ([], 10)
    assert sum(tenth.stored_bytes for tenth in tenths) >= 20 * CAPACITY
    sizes = [tenth.file_bytes for tenth in tenths]
    assert max(sizes[1:]) - min(sizes[1:]) <= CAPACITY // 50
    assert disk_bytes(tmp_path / "tier") <= CAPACITY
    # Full, but for the room that LMDB works in.
    assert all(tenth.live_bytes > CAPACITY // 3 for tenth in tenths)
    assert all(tenth.evicted > 0 for tenth in tenths[1:])
    hits = sum(tenth.hot_hits for tenth in tenths[1:])
    assert hits > 0.7 * sum(tenth.hot_reads for tenth in tenths[1:])
    churn.close()
