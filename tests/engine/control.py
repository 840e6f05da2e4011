"""What is done between requests, by the engine's process or by a server's client alike."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.engine.actions import Generate, Metrics

SHORT = Generate((tuple(range(3, 11)),), max_tokens=2)
"""Shorter than any block: nothing is stored or loaded for it. vLLM hands on statistics with engine
steps only, so it is asked before each look at them."""

_SETTLE_SECONDS = 60.0
_STEP_SECONDS = 0.1


def await_settled(look: Callable[[], Metrics]) -> None:
    """Return when two looks in a row find that all tiers are open and nothing waits or moves.

    Raises:
        TimeoutError: a minute was not enough.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    before, now = look(), look()
    while not now.settled(before):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"after {_SETTLE_SECONDS:.0f} s tiers were still opening, or blocks still written"
            )
        time.sleep(_STEP_SECONDS)
        before, now = now, look()


def write_plan(file: Path, plan: Mapping[str, Any]) -> None:
    """Tell the faulty store what fails, from its next call on."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(plan))
    os.replace(new, file)  # never seen half written
