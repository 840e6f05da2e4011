"""Frozen values that every part of tiered-kv shares.

A **block** is what one key names and one tier slot holds: the KV of `chunk` consecutive engine
blocks, all layers of one KV group, one rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NewType

from tiered_kv.errors import IdentityError

__all__ = [
    "CPU",
    "FORMAT_VERSION",
    "GPU",
    "PAGE_BYTES",
    "BlockKey",
    "BlockStatus",
    "CacheGeometry",
    "ChecksumKind",
    "Fingerprint",
    "GroupGeometry",
    "JobId",
    "JobKind",
    "Medium",
    "Namespace",
]

BlockKey = NewType("BlockKey", bytes)
"""Bytes that name a block's content (1 to 256 bytes)."""

JobId = NewType("JobId", int)

Medium = NewType("Medium", str)
"""Name of a kind of memory or storage. The set is open: a plug-in brings its own."""

GPU = Medium("gpu")
CPU = Medium("cpu")

FORMAT_VERSION = 4
"""Version of what is written to disk. It is part of every fingerprint."""

PAGE_BYTES = 4096
"""Host slots are multiples of this, so that O_DIRECT can read and write them."""


class JobKind(StrEnum):
    """Direction of a job, seen from the engine."""

    LOAD = "load"
    STORE = "store"
    PROMOTE = "promote"
    """From stores into host slots, ahead of a load."""


class ChecksumKind(StrEnum):
    """How a block's checksum is computed."""

    XXH3 = "xxh3"
    """XXH3-64, computed by the processor."""
    WSUM = "wsum"
    """Weighted sum of the block's 64-bit words: the same value from the processor and from the
    engine's device, for blocks that move between device and disk without passing host memory."""


class BlockStatus(Enum):
    """What became of one block of a job or of one hop."""

    OK = "ok"
    MISSING = "missing"
    """Not stored (any more)."""
    CORRUPT = "corrupt"
    """Bytes differ from what was captured; the row was dropped."""
    NO_SPACE = "no_space"
    """A store found no room."""
    OVER_BUDGET = "over_budget"
    """The tier's write budget of the day leaves no room for it."""
    TIER_ERROR = "tier_error"
    """The tier failed; the block may still be there."""
    TIMED_OUT = "timed_out"
    """Not done within the deadline; the block may still be there."""
    CANCELLED = "cancelled"
    """Given up by the caller, or poisoned because its source may have changed."""

    # A status per block is put into sets and dictionaries; an Enum's own hash is a Python function.
    __hash__ = object.__hash__

    @property
    def lost(self) -> bool:
        """Whether the block is known to be gone from its source."""
        return self in (BlockStatus.MISSING, BlockStatus.CORRUPT)


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Size of the blocks of one KV group on one rank."""

    index: int
    """Group number, as the engine counts them."""
    block_bytes: int
    """Bytes of one whole block of this group on one rank."""
    chunk: int
    """Engine blocks per block."""
    tokens: int
    """Tokens per block."""


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """Shape of the KV cache of one rank; made once and used by both halves."""

    groups: tuple[GroupGeometry, ...]
    rank: int
    world_size: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a host slot: the largest block, rounded up to whole pages."""
        largest = max(group.block_bytes for group in self.groups)
        return -(-largest // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that determines a block's bytes, as sorted (field, value) pairs."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Fingerprint:
        """Build from a mapping; values are rendered with `str`.

        Raises:
            IdentityError: a value is an unresolved "auto" or None.
        """
        rendered = {name: str(value) for name, value in fields.items()}
        unresolved = sorted(k for k, v in rendered.items() if v.lower() in ("auto", "none", ""))
        if unresolved:
            raise IdentityError(
                f"cannot name this cache: {', '.join(unresolved)} is not resolved to a value; "
                "blocks stored under it could not be told apart later"
            )
        return cls(tuple(sorted(rendered.items())))

    @property
    def digest(self) -> bytes:
        """16 bytes; equal for equal fields on every machine."""
        text = json.dumps(self.fields, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Names of the fields whose values differ."""
        mine, theirs = dict(self.fields), dict(other.fields)
        names = sorted(mine.keys() | theirs.keys())
        return tuple(n for n in names if mine.get(n) != theirs.get(n))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where an engine's blocks live inside a store: one fingerprint, optionally an epoch."""

    fingerprint: Fingerprint
    epoch: bytes = b""
    """Empty, or random bytes after a reset."""

    @property
    def id(self) -> bytes:
        """8 bytes that prefix every key of this namespace inside a store."""
        return hashlib.blake2b(self.fingerprint.digest + self.epoch, digest_size=8).digest()
