"""The transfer engine's limits: every wait and every queue has one."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.engine.breaker import BreakerRules

__all__ = ["BEHIND_BYTES", "GROUP_BYTES", "EngineLimits"]

GROUP_BYTES = 4 * 2**20
"""About how many bytes one handler call moves, unless a limit says otherwise."""

BEHIND_BYTES = 16 * 2**20
"""The same for write-behind: a store's transaction and flushes then serve more blocks."""


LONGEST_RETRY = 6.0
"""Times `retry_after`: how rarely a hop that stays broken is tried at the least."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Seconds and bytes within which the engine works."""

    load_deadline: float
    """Seconds from its submission after which a load gives up what has not come; its job may name
    fewer. A call of a chain that another healthy one can take the blocks over from gets half of
    them, so that time is left for the other. A hop hangs when a call has run for as long."""
    store_deadline: float
    """Seconds. The longest that a store waits for staging, and that a write to a tier may run
    before the tier counts as hanging; half of it where another chain can take the blocks over."""
    store_queue_bytes: int
    """Bytes that may wait for, or be in, write-behind, all tiers together. A tier that has less
    than its share of them takes room from those that have more."""
    store_queue_seconds: float = 30.0
    """Seconds that a tier may need to write what waits for it, at its measured speed."""
    yield_seconds: float = 1.0
    """How long the writes to a tier give way at most to loads from it that leave no gap."""
    write_behind_share: float = 0.25
    """Share of the host tier's slots that write-behind may hold."""
    group_bytes: int = GROUP_BYTES
    """About how many bytes one handler call moves; at least one block."""
    behind_bytes: int = BEHIND_BYTES
    """The same for write-behind, which nobody waits for; less where the tier is slow, see
    `tiered_kv.engine.pace`."""
    threads_per_tier: int = 6
    """Blocking calls at once, per tier and direction; direct hops have as many of their own. More
    than a disk needs to be busy: some look up rows or compare bytes while the others read."""
    retry_after: float = 5.0
    """Seconds until a hop whose breaker opened is tried again; each further time twice as long, at
    most `LONGEST_RETRY` times as long."""
    least_faults: int = 3
    fault_share: float = 0.5
    timeouts_in_a_row: int = 2
    """When a breaker opens; see `BreakerRules`."""

    def breaker(self) -> BreakerRules:
        """When a hop's breaker opens, and for how long."""
        return BreakerRules(
            retry_after=self.retry_after,
            longest_retry=LONGEST_RETRY * self.retry_after,
            least_faults=self.least_faults,
            fault_share=self.fault_share,
            timeouts_in_a_row=self.timeouts_in_a_row,
        )

    def call_seconds(self, deadline: float, *, other_chain: bool) -> float:
        """How long one call may run under one of the two deadlines."""
        return deadline / 2 if other_chain else deadline

    def __post_init__(self) -> None:
        if min(self.load_deadline, self.store_deadline, self.retry_after) <= 0:
            raise ValueError("deadlines must be above 0 seconds")
        if min(self.store_queue_seconds, self.yield_seconds) <= 0:
            raise ValueError("store_queue_seconds and yield_seconds must be above 0 seconds")
        if not 0 <= self.write_behind_share <= 1:
            raise ValueError(f"write_behind_share {self.write_behind_share} is not in 0..1")
        if min(self.group_bytes, self.behind_bytes, self.threads_per_tier) < 1:
            raise ValueError("group_bytes, behind_bytes and threads_per_tier must be at least 1")
        if self.store_queue_bytes < 0:
            raise ValueError("store_queue_bytes must be at least 0")
