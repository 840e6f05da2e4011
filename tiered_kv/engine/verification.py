"""Which blocks of a load are compared with their checksums, by a tier's `verify`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tiered_kv.contracts import NewBlock, VerifyMode
from tiered_kv.index import KeySet
from tiered_kv.stats import StatsRecorder

__all__ = ["TierVerification"]

MOST_REMEMBERED = 1_000_000
"""Blocks in each of the two halves of what is remembered: up to 27 MB per tier where `verify` is
`first`."""


class TierVerification:
    """A `Verification` that counts what was loaded without.

    For `first` it remembers the blocks that were found right, by a hash of key and checksum, so
    that a block that comes back with other contents is compared again. It remembers them in two
    halves: a full one becomes the older one, and the older one is forgotten. Two blocks with one
    hash are taken for one, which is as unlikely as a wrong block that fits its checksum.
    """

    def __init__(
        self, mode: VerifyMode, tier: str, stats: StatsRecorder, *, most: int = MOST_REMEMBERED
    ) -> None:
        """`most` is how many blocks each half holds."""
        self._mode = mode
        self._tier = tier
        self._stats = stats
        self._most = most
        self._lock = threading.Lock()
        self._young = KeySet()
        self._old = KeySet()

    @property
    def mode(self) -> VerifyMode:
        """See `Verification.mode`."""
        return self._mode

    def due(self, blocks: Sequence[NewBlock]) -> list[bool]:
        """See `Verification.due`."""
        if self._mode is VerifyMode.ALWAYS:
            return [True] * len(blocks)
        wanted = [False] * len(blocks)
        if self._mode is VerifyMode.FIRST:
            names = [_name(block) for block in blocks]
            with self._lock:
                young, old = self._young.contains(names), self._old.contains(names)
                # What is still used moves to the younger half.
                again = zip(names, young, old, strict=True)
                self._remember([name for name, here, there in again if there and not here])
            wanted = [not (here or there) for here, there in zip(young, old, strict=True)]
        self._stats.unverified(self._tier, wanted.count(False))
        return wanted

    def passed(self, blocks: Sequence[NewBlock]) -> None:
        """See `Verification.passed`."""
        if self._mode is VerifyMode.FIRST:
            with self._lock:
                self._remember([_name(block) for block in blocks])

    def replaced(self, blocks: Sequence[NewBlock]) -> None:
        """See `Verification.replaced`."""
        if self._mode is VerifyMode.FIRST:
            names = [_name(block) for block in blocks]
            with self._lock:
                self._young.discard(names)
                self._old.discard(names)

    def _remember(self, names: Sequence[bytes]) -> None:
        if not names:
            return
        if len(self._young) + len(names) > self._most:
            self._old, self._young = self._young, KeySet()
        self._young.add(names[: self._most])


def _name(block: NewBlock) -> bytes:
    bound = block.checksum
    numbers = bound.length.to_bytes(8, "big") + bound.value.to_bytes(8, "big")
    return numbers + bound.kind.value.encode() + block.key
