"""Measured values and the limits that they are to keep."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Figure", "show"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value."""

    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def kept(self) -> bool | None:
        """Whether its limit is kept; None where it has none."""
        if self.at_most is not None:
            return self.value <= self.at_most
        if self.at_least is not None:
            return self.value >= self.at_least
        return None

    @property
    def limit(self) -> str:
        """For people."""
        if self.kept is None:
            return ""
        word, bound = "at most", self.at_most
        if bound is None:
            word, bound = "at least", self.at_least
        return f"{word} {bound:.4g}: {'kept' if self.kept else 'NOT KEPT'}"


def show(subject: str, figures: Iterable[Figure]) -> None:
    """Print a table."""
    print(f"\n{subject}")
    for figure in figures:
        print(f"  {figure.name:62} {figure.value:12.4g} {figure.unit:8} {figure.limit}")
    sys.stdout.flush()
