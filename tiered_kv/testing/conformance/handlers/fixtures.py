"""What all checks of a handler use."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tiered_kv.testing.conformance.handlers.bench import Bench
from tiered_kv.testing.conformance.handlers.caches import SHAPES, CacheShape
from tiered_kv.testing.conformance.handlers.case import HandlerCase

__all__ = ["HandlerFixtures", "MakeBench"]


class MakeBench(Protocol):
    """Makes a bench of this shape with these fields of `Bench`; it is closed after the check."""

    def __call__(self, shape: CacheShape = ..., **fields: Any) -> Bench:
        """`fields` name fields of `Bench`."""
        ...


class HandlerFixtures:
    """An instance overrides `case`."""

    @pytest.fixture
    def case(self) -> HandlerCase:
        """The handler under test."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture `case` that returns a HandlerCase"
        )

    @pytest.fixture
    def make(self, case: HandlerCase, tmp_path: Path) -> Iterator[MakeBench]:
        """Makes benches."""
        number = itertools.count()
        with contextlib.ExitStack() as stack:

            def build(shape: CacheShape = SHAPES[1], **fields: Any) -> Bench:
                bench = Bench(case, shape, tmp_path / str(next(number)), **fields)
                stack.callback(bench.close)
                return bench

            yield build
