"""The contract of what decides which loaded blocks are compared with their checksums."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from tiered_kv.contracts.store import NewBlock

__all__ = ["Verification", "VerifyAlways", "VerifyMode"]


class VerifyMode(StrEnum):
    """When the bytes of a tier's blocks are compared with their checksums at the end of a load."""

    ALWAYS = "always"
    FIRST = "first"
    """The first time that this process loads them."""
    NEVER = "never"
    """Not at all: what rotted on the medium is served."""


class Verification(Protocol):
    """Decides, for all hops of one tier together, which blocks of a load are compared with their
    checksums. Key and length are compared whatever it says. Thread-safe; never blocks on I/O.

    The engine asks it about blocks that came into host slots. A handler that brings blocks to the
    engine's cache directly, and so verifies by itself, asks it with `HandlerContext.verification`;
    one that does not goes on verifying always.
    """

    @property
    def mode(self) -> VerifyMode:
        """What the tier's `verify` says."""
        ...

    def due(self, blocks: Sequence[NewBlock]) -> list[bool]:
        """Whether the bytes of each block, as its row describes it, are to be compared now. What is
        not counts as loaded without."""
        ...

    def passed(self, blocks: Sequence[NewBlock]) -> None:
        """These were compared, and are what their rows say."""
        ...

    def replaced(self, blocks: Sequence[NewBlock]) -> None:
        """These were written to the tier just now: what is known of their bytes is out of date."""
        ...


class VerifyAlways:
    """Every block of every load."""

    mode = VerifyMode.ALWAYS

    def due(self, blocks: Sequence[NewBlock]) -> list[bool]:
        """All of them."""
        return [True] * len(blocks)

    def passed(self, blocks: Sequence[NewBlock]) -> None:
        """Nothing to remember."""

    def replaced(self, blocks: Sequence[NewBlock]) -> None:
        """Nothing to forget."""
