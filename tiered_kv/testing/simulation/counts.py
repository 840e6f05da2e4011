"""What happened in a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """Counted by the simulated engine, not by what it tests."""

    steps: int = 0
    requests: int = 0
    """Added."""
    finished: int = 0
    """Ended with their answer."""
    aborts: Counter[str] = field(default_factory=Counter)
    """By what the request was doing: waiting, loading, running."""
    preemptions: int = 0
    preemptions_in_loads: int = 0
    """Of them, those at a time when blocks were being loaded."""
    resets: int = 0
    computed_tokens: int = 0
    """By the simulated forward passes; a token that was computed again counts again."""
    device_tokens: int = 0
    """Found in the engine's own cache."""
    loaded_tokens: int = 0
    """By loads that went well."""
    loads: int = 0
    """Load jobs given to the ranks."""
    completed_loads: int = 0
    """Of them, those that went well on all ranks, for a request that still waited for it."""
    loaded_blocks: Counter[str] = field(default_factory=Counter)
    """By tier, in loads that went well; each block once, whatever the number of ranks."""
    failed_loads: int = 0
    """Requests whose load failed on a rank."""
    failed_blocks: Counter[str] = field(default_factory=Counter)
    """Failed blocks of loads, by status; each rank's part counts."""
    recomputes: int = 0
    """Requests that went on after a failed load."""
    stores: int = 0
    """Store jobs given to the ranks."""
    completed_stores: int = 0
    """Of them, those whose first hop went well on all ranks."""
    stored_blocks: int = 0
    """In store jobs; each block once, whatever the number of ranks."""
    unstored_blocks: Counter[str] = field(default_factory=Counter)
    """Blocks of stores that failed, by status; "cancelled" are the poisoned ones."""
    flushes: int = 0
    """Steps that waited for jobs before engine blocks were used again."""
    flushed_jobs: int = 0
    sent: int = 0
    """Finished requests whose blocks were held until all ranks had named them."""
    late_outputs: int = 0
    """Outputs of a rank that arrived a step later."""
    repeated_messages: int = 0
    """Messages that a rank got twice."""
    checked_blocks: int = 0
    """Engine blocks of a layer and a rank whose bytes were compared before they were read."""

    def __str__(self) -> str:
        shown: list[str] = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Counter):
                value = ", ".join(f"{name} {count}" for name, count in sorted(value.items())) or 0
            shown.append(f"{each.name}: {value}")
        return "\n".join(shown)
