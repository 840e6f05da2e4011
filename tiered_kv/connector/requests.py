"""What the manager remembers about a request between its first lookup and its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tiered_kv.errors import ConfigError
from tiered_kv.specs import SlotRef
from tiered_kv.values import BlockKey

__all__ = ["Answer", "RequestState", "allowed_tiers"]


class Answer(Enum):
    """What a lookup says about one block."""

    HIT = "hit"
    """Whole and loadable now."""
    PENDING = "pending"
    """Another job is storing it."""
    RETRY = "retry"
    """Not known yet; ask again."""
    MISS = "miss"


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
    asked_since: float | None = None
    """Monotonic seconds of the first lookup that is not settled yet."""
    answered_at: float = 0.0
    failures: int = 0
    """Failed blocks, of all requests, that were known when `answers` was made."""
    failed_loads: int = 0
    finished: bool = False
    loading: dict[BlockKey, str] = field(default_factory=dict)
    """Tier that each block of the running load comes from."""
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
        self.asked_since = None


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
