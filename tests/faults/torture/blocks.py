"""Which blocks are stored, and what every process knows of their content."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tests.stores.lmdb_parts import open_into_map, open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import NewBlock
from tiered_kv.testing.conformance.blocks import (
    NAMESPACE,
    OTHER_NAMESPACE,
    StoreArguments,
    key,
)
from tiered_kv.testing.conformance.children import Opener

__all__ = [
    "BATCH",
    "BLOCK_BYTES",
    "TIERS",
    "Writer",
    "content",
    "length_of",
    "new_block",
    "writers",
]

BLOCK_BYTES = (16_384, 6_000)
"""Length of most blocks, and of every fifth."""
BATCH = 4
"""Blocks per batch."""
CAPACITY = 6 * 2**20
RANKS = 2
_OTHERS = 10**9

TIERS: dict[str, tuple[Opener, tuple[str, ...]]] = {
    "nvme": (open_nvme, ("none", "batch", "full")),
    "lmdb": (open_lmdb, ("none", "batch", "full")),
    "lmdb_map": (open_into_map, ("none",)),
}
"""By tier, how it is opened and what it offers; writing into the map goes with none alone."""


@dataclass(frozen=True, slots=True)
class Writer:
    """One of the processes of a round: a rank of the one engine, or the other engine."""

    opener: Opener
    arguments: StoreArguments
    first: int
    """The number of the first block of its namespace."""

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.arguments.rank


def writers(tier: str, durability: str, path: Path) -> list[Writer]:
    """Both ranks of one namespace, and a writer of another."""
    opener = TIERS[tier][0]
    one = StoreArguments(
        path,
        CAPACITY,
        NAMESPACE,
        world_size=RANKS,
        block_bytes=BLOCK_BYTES,
        extra=(("durability", durability),),
    )
    ranks = [Writer(opener, one.with_(rank=rank), 0) for rank in range(RANKS)]
    return [*ranks, Writer(opener, one.with_(namespace=OTHER_NAMESPACE, world_size=1), _OTHERS)]


def length_of(number: int) -> int:
    """Length of a block in bytes."""
    return BLOCK_BYTES[number % 5 == 0]


@lru_cache(maxsize=2_048)
def content(number: int, rank: int) -> bytes:
    """What a block holds on a rank."""
    return random.Random((number << 8) + rank).randbytes(length_of(number))


@lru_cache(maxsize=2_048)
def new_block(number: int, rank: int) -> NewBlock:
    """A block as `reserve` wants it."""
    data = memoryview(content(number, rank))
    return NewBlock(key(number), BlockChecksum.capture(key(number), rank, data))
