"""What goes wrong, and at which calls: values that can be written down as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tiered_kv.values import BlockKey

__all__ = ["Effect", "Fault", "FaultPlan", "Method"]


class Method(StrEnum):
    """Where: a method of `BlockStore`, or the opening of a store."""

    OPEN = "open"
    CONTAINS = "contains"
    RESERVE = "reserve"
    WRITE = "write"
    PUBLISH = "publish"
    ABANDON = "abandon"
    READ = "read"
    DISCARD = "discard"
    DELETE = "delete"
    TOUCH = "touch"
    SCAN = "scan"
    CHANGES = "changes"
    STAT = "stat"
    CLOSE = "close"


class Effect(StrEnum):
    """What."""

    TIER_ERROR = "tier_error"
    """Raises `TierError` from an `OSError` of EIO, as a store does that translates its errors."""
    NO_SPACE = "no_space"
    """Raises `NoSpace` from an `OSError` of ENOSPC."""
    EIO = "eio"
    """Raises the `OSError` itself: a store that forgot to translate."""
    ENOSPC = "enospc"
    """Likewise."""
    BUG = "bug"
    """Raises `RuntimeError`: a store's code may be wrong anywhere."""
    SLOW = "slow"
    """The call begins `Fault.seconds` later, or when `Faults.let_go` is called."""
    HANG = "hang"
    """The call begins when `Faults.let_go` is called."""
    BLOCK_ERROR = "block_error"
    """`read` answers TIER_ERROR for these blocks alone."""
    NOT_FOUND = "not_found"
    """`read` answers MISSING for these blocks, which are there: others listed them, or an index and
    its data do not agree."""
    NO_ROW = "no_row"
    """`read` answers OK without the checksum that the contract asks for."""
    VANISH = "vanish"
    """The blocks are deleted: after `contains` said that they are there, or right before `read`
    looks for them."""
    SHORT = "short"
    """Only the first half of the bytes is read, or reaches the medium; nobody says so."""
    FLIP = "flip"
    """One bit, somewhere, is read or written as the other one."""
    FOREIGN = "foreign"
    """`read` answers with another block, bytes and row; `write` writes another block's bytes."""
    LIE = "lie"
    """The call says that it did what it did not do: `contains` says yes, `reserve` that the block
    is published already, `write` leaves zeros on the medium, `publish` publishes nothing,
    `read` answers with the row and leaves the memory as it was, `discard` and `delete` count
    blocks that they leave where they are, `touch` and `abandon` do nothing, `scan` finds no key,
    `changes` tells no news."""


_ANYWHERE = frozenset(Method)
_MOVING = frozenset({Method.READ, Method.WRITE})
_BELIEVED = _ANYWHERE - {Method.OPEN, Method.STAT, Method.CLOSE}

POSSIBLE = {
    Effect.TIER_ERROR: _ANYWHERE,
    Effect.NO_SPACE: _ANYWHERE,
    Effect.EIO: _ANYWHERE,
    Effect.ENOSPC: _ANYWHERE,
    Effect.BUG: _ANYWHERE,
    Effect.SLOW: _ANYWHERE,
    Effect.HANG: _ANYWHERE,
    Effect.BLOCK_ERROR: frozenset({Method.READ}),
    Effect.NOT_FOUND: frozenset({Method.READ}),
    Effect.NO_ROW: frozenset({Method.READ}),
    Effect.VANISH: frozenset({Method.CONTAINS, Method.READ}),
    Effect.SHORT: _MOVING,
    Effect.FLIP: _MOVING,
    Effect.FOREIGN: _MOVING,
    Effect.LIE: _BELIEVED,
}
"""At which methods each effect can be."""
RAISING = frozenset({Effect.TIER_ERROR, Effect.NO_SPACE, Effect.EIO, Effect.ENOSPC, Effect.BUG})
HOLDING = frozenset({Effect.SLOW, Effect.HANG})


class Fault(BaseModel, frozen=True):
    """One thing that goes wrong. Without further fields, at every call and for every block of it;
    each further field leaves some out."""

    model_config = ConfigDict(extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")

    method: Method
    effect: Effect
    calls: tuple[int, ...] = ()
    """At these calls of the method, counted from 1 since the fault was injected."""
    every: int = Field(default=1, ge=1)
    """At every n-th call."""
    after: int = Field(default=0, ge=0)
    """Not at so many first calls."""
    times: int | None = Field(default=None, ge=1)
    """At so many calls at most."""
    chance: float = Field(default=1.0, gt=0.0, le=1.0)
    """With this probability at each of these calls, drawn from the plan's seed."""
    keys: frozenset[bytes] = frozenset()
    """For these blocks only, and at calls for one of them; hexadecimal in JSON."""
    positions: tuple[int, ...] = ()
    """For the blocks at these places of a batch only, counted from 0."""
    seconds: float = Field(default=0.0, ge=0.0)
    """How long SLOW holds a call."""
    done: bool = False
    """An effect that raises does so after the call was carried out, not instead."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.method not in POSSIBLE[self.effect]:
            where = ", ".join(sorted(POSSIBLE[self.effect]))
            raise ValueError(f"{self.effect} cannot be at {self.method}; it can be at {where}")
        if (self.effect is Effect.SLOW) is not (self.seconds > 0):
            raise ValueError(f"{self.effect} with seconds={self.seconds:g}; SLOW alone needs them")
        if self.done and self.effect not in RAISING:
            raise ValueError(f"done=True is for effects that raise; {self.effect} does not")
        return self

    def chooses(self, call: int, keys: Sequence[BlockKey]) -> tuple[int, ...] | None:
        """Positions in a batch that this fault is for, at the `call`-th call; None where it is not
        for this call at all. `times` and `chance` are left to whoever counts."""
        if (self.calls and call not in self.calls) or call <= self.after or call % self.every:
            return None
        chosen = tuple(
            i
            for i, key in enumerate(keys)
            if (not self.keys or key in self.keys) and (not self.positions or i in self.positions)
        )
        if not chosen and (self.keys or self.positions):
            return None
        return chosen


class FaultPlan(BaseModel, frozen=True):
    """All that goes wrong from some moment on."""

    model_config = ConfigDict(extra="forbid", ser_json_bytes="hex", val_json_bytes="hex")

    faults: tuple[Fault, ...] = ()
    """Several may be at one call; the first that raises ends it."""
    seed: int = 0
    """Of `Fault.chance`, and of the bits that FLIP flips."""
