"""How what stands in a file is quoted in an error."""

from __future__ import annotations

import reprlib

__all__ = ["MOST_COUNT", "quoted"]

MOST_COUNT = 10**12
"""No number of tokens, of layers, or of anything else that is counted is greater: sums of them, and
products of a few, stay numbers."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60
_REPR.maxlevel = 3


def quoted(value: object) -> str:
    """A value in at most 60 characters, however large it is or deeply nested."""
    return _REPR.repr(value)[:60]
