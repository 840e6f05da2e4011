"""How the tiers are: their states for the statistics, the log and the manager."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tiered_kv.engine.breaker import BreakerState
from tiered_kv.engine.health import NOT_IN_USE, OPENING, HealthBoard
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Endpoint, Hop, Router, assumed_cost
from tiered_kv.specs import KeySpec
from tiered_kv.stats import LoadRate, StatsRecorder, TierCondition, TierState

__all__ = ["QUIET_SECONDS", "Standing"]

logger = logging.getLogger(__name__)

QUIET_SECONDS = 5.0
"""The log hears of a tier at most this often."""

NEWS = 0.2
"""Relative change of a load rate that the manager is told."""

LATENCY_NEWS_SECONDS = 1e-3
"""And a latency that changed by as much as that, and by so many seconds."""


_Seen = tuple[TierState, str]
"""A state and its reason."""


@dataclass(slots=True)
class _Line:
    """What the log knows of a tier."""

    seen: _Seen = (TierState.OPENING, OPENING)
    at: float = -QUIET_SECONDS
    """When it was told something last."""
    untold: int = 0
    """Changes since then."""
    worked: bool = True
    """Whether nothing was wrong then."""


class Standing:
    """States of all tiers, the host pool ("cpu") among them. Thread-safe; nothing blocks."""

    def __init__(
        self,
        hops: Iterable[Hop],
        board: HealthBoard,
        router: Router,
        tiers: Mapping[str, type[KeySpec]],
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hops` are all that routing knows; `clock` gives monotonic seconds."""
        self._board = board
        self._router = router
        self._stats = stats
        self._clock = clock
        self._ends = {CPU_ENDPOINT.tier: CPU_ENDPOINT}
        self._ends |= {tier: Endpoint(spec, tier) for tier, spec in tiers.items()}
        self._hops = {tier: [hop for hop in hops if hop.tier == tier] for tier in self._ends}
        self._lock = threading.Lock()
        self._lines = {tier: _Line() for tier in self._ends}
        self._reported: dict[str, TierCondition] = {}
        self._version = -1

    # ------------------------------------------------------------------------------ the answers

    def health(self) -> dict[str, tuple[bool, str]]:
        """By tier: whether blocks can be loaded from it, and what is wrong with any of its hops
        ("healthy" if nothing is)."""
        return {tier: self._health_of(tier) for tier in self._ends}

    def conditions(self, *, every: bool) -> list[TierCondition]:
        """The tiers whose condition has changed since the last call, or all."""
        version = self._router.version
        with self._lock:
            if version == self._version and not every:
                return []
            self._version = version
            before = {} if every else dict(self._reported)
        now = {tier: self._condition(tier) for tier in self._ends}
        changed = [one for one in now.values() if _is_news(before.get(one.tier), one)]
        with self._lock:
            self._reported |= {one.tier: one for one in changed}
        return changed

    def note(self) -> None:
        """Something has changed: tell the statistics and the log."""
        for tier in self._ends:
            state = self._state_of(tier)
            if tier != CPU_ENDPOINT.tier:
                self._stats.state(tier, state)
                self._stats.breaker(tier, self._breaker_of(tier).value)
            self._say(tier, (state, self._reason(tier, state)))

    def say_rest(self) -> None:
        """Tell the log what it was not told yet, where it is time for that."""
        with self._lock:
            untold = [tier for tier, line in self._lines.items() if line.untold]
        for tier in untold:
            self._tell(tier)

    def now(self) -> list[TierCondition]:
        """All tiers; no news is taken from `conditions` by that."""
        return [self._condition(tier) for tier in self._ends]

    # --------------------------------------------------------------------------------- private

    def _condition(self, tier: str) -> TierCondition:
        state = self._state_of(tier)
        return TierCondition(tier, state, self._reason(tier, state), self._load_rate(tier))

    def _reason(self, tier: str, state: TierState) -> str:
        if state is TierState.OPENING:
            return OPENING
        return "" if state is TierState.HEALTHY else self._health_of(tier)[1]

    def _troubles(self, tier: str) -> tuple[dict[Hop, str | None], dict[Hop, str]]:
        """What is wrong with the tier's hops; and the direct ones that this set-up does without,
        while others serve."""
        hops = {hop: self._board.trouble(hop) for hop in self._hops[tier]}
        unused = {
            hop: why
            for hop, why in hops.items()
            if hop.direct and why is not None and why.startswith(NOT_IN_USE)
        }
        if len(unused) == len(hops):
            return hops, {}
        return {hop: why for hop, why in hops.items() if hop not in unused}, unused

    def _health_of(self, tier: str) -> tuple[bool, str]:
        troubles, unused = self._troubles(tier)
        serves = any(why is None and hop.src.tier == tier for hop, why in troubles.items())
        reasons = set(troubles.values())
        if not troubles:
            return False, "no handlers are registered for it"
        if len(reasons) == 1:
            said = [reasons.pop() or "healthy"]
        else:
            said = [f"{hop.label}: {why}" for hop, why in troubles.items() if why]
        return serves, "; ".join([*said, *(f"{hop.label} {why}" for hop, why in unused.items())])

    def _state_of(self, tier: str) -> TierState:
        troubles = set(self._troubles(tier)[0].values())
        if troubles == {None}:
            return TierState.HEALTHY
        if OPENING in troubles and troubles <= {None, OPENING}:
            return TierState.OPENING
        return TierState.DEGRADED if self._health_of(tier)[0] else TierState.DOWN

    def _breaker_of(self, tier: str) -> BreakerState:
        """Of the hop by which it is read: into host memory, where there is such a one."""
        loads = [hop for hop in self._hops[tier] if hop.src.tier == tier]
        loads.sort(key=lambda hop: hop.direct)
        return self._board.breaker_state(loads[0]) if loads else BreakerState.CLOSED

    def _load_rate(self, tier: str) -> LoadRate | None:
        """Along the chain that a load would take; along the other one, where only that was
        measured."""
        end = self._ends[tier]
        tried: frozenset[tuple[Hop, ...]] = frozenset()
        while (chain := self._router.find(end, GPU_ENDPOINT, tried)) is not None:
            rates = [self._rate(hop, known=hop.tier == tier) for hop in chain.hops]
            measured = [rate for rate in rates if rate is not None]
            if len(measured) == len(rates):
                return LoadRate(
                    min(rate.bytes_per_second for rate in measured),
                    sum(rate.latency_seconds for rate in measured),
                )
            tried |= {chain.hops}
        return None

    def _rate(self, hop: Hop, *, known: bool) -> LoadRate | None:
        """As measured; as assumed where it need not be `known`: a copy inside memory slows no tier
        down."""
        rate = self._board.rate(hop)
        if rate is None and not known:
            assumed = assumed_cost(hop)
            return LoadRate(assumed.bytes_per_second, assumed.latency_seconds)
        return rate

    def _say(self, tier: str, now: _Seen) -> None:
        with self._lock:
            line = self._lines[tier]
            if line.seen == now:
                return
            line.seen = now
            line.untold += 1
        self._tell(tier)

    def _tell(self, tier: str) -> None:
        """Write the log's line, where there is news and it is time."""
        now = self._clock()
        with self._lock:
            line = self._lines[tier]
            if not line.untold or now - line.at < QUIET_SECONDS:
                return
            (state, reason), untold = line.seen, line.untold - 1
            line.untold, line.at = 0, now
            fine = state is TierState.HEALTHY or reason.startswith(NOT_IN_USE)
            worked, line.worked = line.worked, fine
        if untold:
            reason += f" ({untold} changes before that were not told)"
        logger.log(
            logging.INFO if worked and fine else logging.WARNING,
            "tier %s is %s%s",
            tier,
            state.value,
            f": {reason}" if reason else "",
        )


def _is_news(before: TierCondition | None, now: TierCondition) -> bool:
    if before is None or (before.state, before.reason) != (now.state, now.reason):
        return True
    old, new = before.load, now.load
    if old is None or new is None:
        return old is not new
    apart = abs(new.latency_seconds - old.latency_seconds)
    return abs(new.bytes_per_second - old.bytes_per_second) > NEWS * old.bytes_per_second or (
        apart > LATENCY_NEWS_SECONDS and apart > NEWS * old.latency_seconds
    )
