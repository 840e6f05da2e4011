"""The transfer engine's limits: every wait and every queue has one."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BEHIND_BYTES", "GROUP_BYTES", "EngineLimits"]

GROUP_BYTES = 4 * 2**20
"""About how many bytes one handler call moves, unless a limit says otherwise."""

BEHIND_BYTES = 16 * 2**20
"""The same for write-behind: a store's transaction and flushes then serve more blocks."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Seconds and bytes within which the engine works."""

    load_deadline: float
    """Seconds. A load that could not begin to read a block within it gives the block up, and so
    does a read that has run for longer. A call of a chain that another healthy one can take the
    blocks over from gets half of it, so that time is left for the other."""
    store_deadline: float
    """Seconds. The longest that a store waits for staging, and that a write to a tier may run
    before the tier counts as hanging; half of it where another chain can take the blocks over."""
    store_queue_bytes: int
    """Bytes that may wait for, or be in, write-behind, all tiers together."""
    write_behind_share: float = 0.25
    """Share of the host tier's slots that write-behind may hold."""
    group_bytes: int = GROUP_BYTES
    """About how many bytes one handler call moves; at least one block."""
    behind_bytes: int = BEHIND_BYTES
    """The same for write-behind, which nobody waits for."""
    threads_per_tier: int = 4
    """Blocking calls at once, per tier and direction; direct hops have as many of their own."""
    retry_after: float = 5.0
    """Seconds until a hop that failed is tried again."""

    def call_seconds(self, deadline: float, *, other_chain: bool) -> float:
        """How long one call may run under one of the two deadlines."""
        return deadline / 2 if other_chain else deadline

    def __post_init__(self) -> None:
        if min(self.load_deadline, self.store_deadline, self.retry_after) <= 0:
            raise ValueError("deadlines must be above 0 seconds")
        if not 0 <= self.write_behind_share <= 1:
            raise ValueError(f"write_behind_share {self.write_behind_share} is not in 0..1")
        if min(self.group_bytes, self.behind_bytes, self.threads_per_tier) < 1:
            raise ValueError("group_bytes, behind_bytes and threads_per_tier must be at least 1")
        if self.store_queue_bytes < 0:
            raise ValueError("store_queue_bytes must be at least 0")
