"""What the manager remembers about a request between its first lookup and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tiered_kv.errors import ConfigError
from tiered_kv.placement import CutReason
from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey

__all__ = ["Answer", "Loading", "RequestState", "allowed_tiers"]


class Answer(Enum):
    """What a lookup says about one block."""

    HIT = "hit"
    """Whole and loadable now."""
    PENDING = "pending"
    """Another job is storing it."""
    RETRY = "retry"
    """Not known yet; ask again."""
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class Loading:
    """A block of a load that runs."""

    tier: str
    """It comes from here."""
    size: int
    """Bytes per rank; 0 where that is not known."""


@dataclass(slots=True)
class RequestState:
    """Memory of one request. Scheduler thread only."""

    tiers: frozenset[str] | None
    """Tiers that may answer; None means all."""
    host_only: bool = False
    """Its blocks may be in no tier but the host tier."""
    computed: int = -1
    """Tokens that the engine had itself when `answers` was made."""
    answers: dict[BlockKey, Answer] = field(default_factory=dict)
    sources: dict[BlockKey, str] = field(default_factory=dict)
    """Tier of each HIT."""
    withheld: Counter[tuple[str, CutReason]] = field(default_factory=Counter)
    """Blocks that a tier holds but was not to answer for, when it was asked last."""
    keys: Sequence[BlockKey] = ()
    """What was asked for last, group by group."""
    tokens: int | None = None
    """Tokens that the request had then; None: not known."""
    cut: tuple[int, CutReason] | None = None
    """Tokens up to which its prefix is loaded at most, as was decided, and why."""
    decided: bool = False
    """Whether it was decided about since its answers were forgotten."""
    found_at: float | None = None
    """Monotonic seconds since which it could have been loaded."""
    load_seconds: float = 0.0
    """How long its load was predicted to take then."""
    patience: float = 0.0
    """Seconds for which it waits, then, for another request that loads its blocks."""
    asked_since: float | None = None
    """Monotonic seconds of the first lookup that is not settled yet."""
    answered_at: float = 0.0
    failures: int = 0
    """Failed blocks, of all requests, that were known when `answers` was made."""
    failed_loads: int = 0
    far_until: float | None = None
    """Until when it waits for blocks of far tiers, in monotonic seconds; once in its life."""
    news: int = -1
    """What was known of promotions when `answers` was made, where it waits for nothing else."""
    unpromoted: set[tuple[str, str]] = field(default_factory=set)
    """(tier, reason) of blocks that were counted as not promoted."""
    finished: bool = False
    unsure: bool = False
    """Whether a reset came while it was loaded. Nobody hears whether the blocks came, then: an
    engine that forgets the job with the reset takes them for whole."""
    loading: dict[BlockKey, Loading] = field(default_factory=dict)
    """The blocks of the running load."""
    pins: list[SlotRef] = field(default_factory=list)
    """Host slots that the running load pins."""

    def settled(self) -> bool:
        """Whether no answer is to be asked again."""
        return not any(a in (Answer.PENDING, Answer.RETRY) for a in self.answers.values())

    def forget_answers(self) -> None:
        """Make the next lookup ask the tiers again."""
        self.computed = -1
        self.answers.clear()
        self.sources.clear()
        self.cut = None
        self.found_at = None
        self.decided = False
        self.asked_since = None
        self.news = -1


def allowed_tiers(
    params: Mapping[str, Any] | None, configured: Iterable[str]
) -> frozenset[str] | None:
    """Read the hint `{"tiered_kv": {"tiers": [...]}}` of a request's `kv_transfer_params`.

    None means that all tiers may answer.

    Raises:
        ConfigError: the hint is not of this form or names an unknown tier.
    """
    hint = (params or {}).get("tiered_kv")
    if hint is None:
        return None
    names = hint.get("tiers") if isinstance(hint, Mapping) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f'kv_transfer_params["tiered_kv"] must be {{"tiers": [names of tiers]}}, not {hint!r}'
        )
    known = frozenset(configured)
    unknown = sorted(set(names) - known)
    if unknown:
        raise ConfigError(
            f"kv_transfer_params names unknown tiers {', '.join(unknown)}; "
            f"configured are {', '.join(sorted(known))}"
        )
    return frozenset(names)
