"""Real tiers for the tests of what looks after them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.config import load
from tiered_kv.connector.assembly import Assembly
from tiered_kv.contracts import BlockStore
from tiered_kv.plugins import Plugins
from tiered_kv.testing.conformance.blocks import (
    NAMESPACE,
    OTHER_NAMESPACE,
    StoreArguments,
    content,
    put,
)
from tiered_kv.testing.conformance.children import Opener

__all__ = ["DATA", "OPENERS", "RANKS", "Tiers"]

RANKS = 2
OPENERS: dict[str, Opener] = {"nvme": open_nvme, "lmdb": open_lmdb}
DATA = {"nvme": "segment-*", "lmdb": "data.mdb"}
"""Where the bytes of blocks lie in a tier's directory."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Two tiers of one type: `a` and `b`; and `a` again as a tier that is read only."""

    kind: str
    folder: Path
    capacity: str = "24MiB"

    def __post_init__(self) -> None:
        head = "tiers:\n  - {name: host, type: cpu, capacity: 16MiB}\n"
        for file, more in ((self.config, ""), (self.read_only, ", access: read")):
            tiers = "".join(
                f"  - {{name: {name}, type: {self.kind}, path: {self.folder / name}, "
                f"capacity: {self.capacity}, min_free: 0%{more}}}\n"
                for name in "ab"
            )
            placement = "placement: {write: [host]}\n" if more else ""
            file.write_text(head + tiers + placement)

    @property
    def config(self) -> Path:
        return self.folder / "deployment.yaml"

    @property
    def read_only(self) -> Path:
        return self.folder / "read-only.yaml"

    def arguments(self, tier: str, rank: int = 0) -> StoreArguments:
        return StoreArguments(self.folder / tier, capacity=24 * 2**20, rank=rank, world_size=RANKS)

    @contextmanager
    def opened(self, tier: str, rank: int, *, other: bool = False) -> Iterator[BlockStore]:
        assembly = Assembly(load(self.config, Plugins()), Plugins().deployed([self.kind]))
        namespace = OTHER_NAMESPACE if other else NAMESPACE
        geometry = self.arguments(tier, rank).geometry
        store = assembly.open_namespace(tier, geometry, namespace, writable=True)
        try:
            yield store
        finally:
            store.close()

    def fill(self, tier: str, numbers: Sequence[int], *, other: bool = False) -> None:
        for rank in range(RANKS):
            with self.opened(tier, rank, other=other) as store:
                put(store, numbers, rank)

    def data_files(self, tier: str) -> list[Path]:
        return sorted((self.folder / tier).rglob(DATA[self.kind]))

    def flip(self, tier: str, number: int, rank: int, bit: int) -> None:
        """Flip one bit of a block, wherever the tier has its byte."""
        whole = content(number, rank)
        # An lmdb tier keeps the beginning of a block apart from the rest.
        parts = ((0, whole),) if self.kind == "nvme" else ((0, whole[:16]), (16, whole[16:]))
        [(start, part)] = [p for p in parts if p[0] <= bit // 8 < p[0] + len(p[1])]
        copies = 0
        for file in self.data_files(tier):
            data = file.read_bytes()
            offset = data.find(part)
            while offset >= 0:
                with file.open("r+b") as stream:
                    place = offset + bit // 8 - start
                    stream.seek(place)
                    stream.write(bytes([data[place] ^ 1 << bit % 8]))
                copies += 1
                offset = data.find(part, offset + 1)
        assert copies, f"block {number} of rank {rank} does not lie in tier {tier}"
