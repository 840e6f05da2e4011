"""F19: the limit is a limit, whatever lay in the directory before and whatever comes into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import MIB, open_nvme, open_striped
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, NewBlock, Place
from tiered_kv.testing.conformance.blocks import StoreArguments, disk_bytes, page_aligned
from tiered_kv.values import BlockKey, BlockStatus
from tiered_kv_nvme import budget

pytestmark = pytest.mark.faults

CAP = 64 * MIB
BATCH = 8
BLOCK = MIB
OPENERS: dict[str, Callable[[StoreArguments], BlockStore]] = {
    "nvme": open_nvme,
    "striped": open_striped,
    "lmdb": open_lmdb,
    "lmdb into the map": open_into_map,
}


class Tier:
    """Stores blocks of 1 MiB, and looks at the disk after each step."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.arguments = StoreArguments(folder, CAP, block_bytes=(BLOCK,))
        self._open = OPENERS[kind]
        self.memory = [page_aligned(BLOCK) for _ in range(BATCH)]
        for view in self.memory:
            view[:] = os.urandom(BLOCK)
        self.most = 0
        self.stored = 0
        self.store = self._open(self.arguments)

    def reopen(self) -> None:
        self.store.close()
        self.store = self._open(self.arguments)
        self._look()

    def _look(self) -> None:
        used = disk_bytes(self.arguments.path)
        self.most = max(self.most, used)
        assert used <= CAP + BATCH * BLOCK, f"{used} bytes after {self.stored} blocks"

    def put(self, megabytes: int) -> list[BlockKey]:
        """Store so much; the last batch's keys."""
        keys: list[BlockKey] = []
        for _ in range(megabytes // BATCH):
            keys = [BlockKey((self.stored + i).to_bytes(8, "big")) for i in range(BATCH)]
            for key, view in zip(keys, self.memory, strict=True):
                view[:8] = key
            blocks = [
                NewBlock(key, BlockChecksum.capture(key, 0, view))
                for key, view in zip(keys, self.memory, strict=True)
            ]
            places = [place for place in self.store.reserve(blocks) if isinstance(place, Place)]
            assert len(places) == BATCH
            self._look()
            self.store.write(places, self.memory)
            self._look()
            self.store.publish(places)
            self._look()
            self.stored += BATCH
        return keys

    def check(self, keys: list[BlockKey]) -> None:
        memory = [page_aligned(BLOCK) for _ in keys]
        for key, view, result in zip(keys, memory, self.store.read(keys, memory), strict=True):
            assert result.status is BlockStatus.OK
            assert result.checksum is not None
            assert result.checksum.verifies(key, 0, view)


@pytest.fixture
def tiers() -> Iterator[list[Tier]]:
    """Tiers whose stores are closed after the test."""
    made: list[Tier] = []
    yield made
    for tier in made:
        tier.store.close()


@pytest.mark.parametrize("kind", OPENERS)
def test_f19_the_disk_never_holds_more_than_the_capacity(
    kind: str, tmp_path: Path, tiers: list[Tier]
) -> None:
    """64 MiB, of which 256 MiB are stored; restarted beside 16 MiB of others' files; stored again.
    Never more than the capacity and one batch."""
    tier = Tier(kind, tmp_path / "tier")
    tiers.append(tier)
    tier.check(tier.put(256))
    alone = tier.store.stat().blocks
    path = tier.arguments.path / ("third" if kind == "striped" else ".")
    (path / "notes").mkdir()
    (path / "notes" / "old.bin").write_bytes(os.urandom(4 * MIB))
    # Named like ours, and not ours: nothing deletes it, everything counts it.
    (path / "segment-099999").write_bytes(os.urandom(12 * MIB))
    tier.reopen()
    tier.check(tier.put(128))
    stat = tier.store.stat()
    used = disk_bytes(tier.arguments.path)
    print(
        f"{kind}: {tier.stored} MiB stored, most bytes on the disk {tier.most} of {CAP}; {alone} "
        f"blocks alone, {stat.blocks} beside 16 MiB of others; {stat.evicted_blocks} evicted"
    )
    assert used <= CAP
    assert stat.evicted_blocks > 64
    assert 16 <= stat.blocks < alone
    assert stat.used_bytes >= 16 * MIB
    assert (path / "notes" / "old.bin").stat().st_size == 4 * MIB
    assert (path / "segment-099999").stat().st_size == 12 * MIB


@pytest.mark.parametrize("kind", ["nvme", "striped"])
def test_f19_what_others_put_there_meanwhile_makes_the_tier_smaller(
    kind: str, tmp_path: Path, tiers: list[Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "MEASURE_SECONDS", 0.0)
    tier = Tier(kind, tmp_path / "tier")
    tiers.append(tier)
    tier.put(80)
    before = tier.store.stat()
    folder = tier.arguments.path / ("second" if kind == "striped" else ".")
    (folder / "dump").write_bytes(os.urandom(24 * MIB))
    assert disk_bytes(tier.arguments.path) > CAP
    tier.check(tier.put(8))
    after = tier.store.stat()
    used = disk_bytes(tier.arguments.path)
    print(f"{before.blocks} blocks, {after.blocks} beside 24 MiB, {used} bytes on the disk")
    assert used <= CAP
    assert 8 <= after.blocks < before.blocks
    (folder / "dump").unlink()
    tier.check(tier.put(80))
    assert tier.store.stat().blocks > after.blocks
