"""What the manager remembers about a request between its first lookup and its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tiered_kv.errors import ConfigError
from tiered_kv.placement import CutReason
from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey

__all__ = ["USUAL", "Answer", "Care", "Loading", "RequestState", "allowed_tiers", "care_for"]


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


@dataclass(frozen=True, slots=True)
class Care:
    """What becomes of the blocks that a request stores."""

    store: bool = True
    """Whether they are stored at all."""
    priority: int = 0
    """-1, 0 or 1: a block in host memory goes for one of no lower priority only."""
    keep: float = 0.0
    """Seconds for which they stay in host memory, as far as its `pin_budget` goes."""
    ttl: float | None = None
    """Seconds after which they leave host memory, unless blocks behind them are there."""


USUAL = Care()


@dataclass(slots=True)
class RequestState:
    """Memory of one request. Scheduler thread only."""

    tiers: frozenset[str] | None
    """Tiers that may answer; None means all."""
    care: Care = USUAL
    """How its blocks are kept."""
    parents: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    """The block before each one that it wanted, in order; None for the first of a KV group, and
    where that is not known."""
    host_only: bool = False
    """Its blocks may be in no tier but the host tier."""
    computed: int = -1
    """Tokens that the engine had itself when `answers` was made."""
    answers: dict[BlockKey, Answer] = field(default_factory=dict)
    sources: dict[BlockKey, str] = field(default_factory=dict)
    """Tier of each HIT."""
    withheld: Counter[tuple[str, CutReason]] = field(default_factory=Counter)
    """Blocks that a tier holds but was not to answer for, when it was asked last."""
    settled: bool = True
    """Whether no answer is to be asked again."""
    mark: object = None
    """Stands for the keys that were asked for last."""
    seen: tuple[object, ...] = ()
    """Versions of what was asked then ..."""
    conditions: int = -1
    """... and of the tiers' conditions."""
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

    def drop_answers(self) -> None:
        """They are used, or nothing is to come of them. Whoever reads `answers` sees that."""
        self.answers.clear()
        self.sources.clear()
        self.settled = True
        self.mark = None

    def forget_answers(self) -> None:
        """Make the next lookup ask the tiers again."""
        self.computed = -1
        self.drop_answers()
        self.cut = None
        self.found_at = None
        self.decided = False
        self.asked_since = None
        self.news = -1


_KNOWN_HINTS = ("keep", "priority", "store", "tiers", "ttl")


def care_for(params: Mapping[str, Any] | None) -> Care:
    """Read the hints `{"tiered_kv": {"store": bool, "priority": -1 | 0 | 1, "keep": seconds,
    "ttl": seconds}}` of a request's `kv_transfer_params`; each may be left out.

    Raises:
        ConfigError: a hint is not of this form, or not known.
    """
    hint = (params or {}).get("tiered_kv")
    if hint is None:
        return USUAL
    where = 'kv_transfer_params["tiered_kv"]'
    if not isinstance(hint, Mapping):
        raise ConfigError(f"{where} must be a mapping of hints, not {hint!r}")
    unknown = sorted(str(name) for name in hint if name not in _KNOWN_HINTS)
    if unknown:
        raise ConfigError(
            f"{where} has unknown hints {', '.join(unknown)}; known are {', '.join(_KNOWN_HINTS)}"
        )
    store, priority = hint.get("store", True), hint.get("priority", 0)
    if not isinstance(store, bool):
        raise ConfigError(f"{where}: store must be true or false, not {store!r}")
    if isinstance(priority, bool) or priority not in (-1, 0, 1):
        raise ConfigError(f"{where}: priority must be -1, 0 or 1, not {priority!r}")
    for name in ("keep", "ttl"):
        value = hint.get(name)
        right = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (right and 0 < value < math.inf):
            raise ConfigError(f"{where}: {name} must be seconds above 0, not {value!r}")
    return Care(store, int(priority), float(hint.get("keep") or 0), hint.get("ttl"))


def allowed_tiers(
    params: Mapping[str, Any] | None, configured: Iterable[str]
) -> frozenset[str] | None:
    """Read the hint `{"tiered_kv": {"tiers": [...]}}` of a request's `kv_transfer_params`.

    None means that all tiers may answer.

    Raises:
        ConfigError: the hint is not of this form or names an unknown tier.
    """
    hint = (params or {}).get("tiered_kv")
    others = isinstance(hint, Mapping) and "tiers" not in hint and bool(hint)
    if hint is None or (others and all(name in _KNOWN_HINTS for name in hint)):
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
