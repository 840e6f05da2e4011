"""Patches that remove a defence each, and what is owed of them.

A patch is named for the row of faults that its defence answers, `f09.patch` or
`f09-few-words.patch`; the text before its first `diff --git` says in one sentence what it removes.
The row's tests are the functions `test_f09_...` in `tests/faults/test_f09_....py`. Each patch makes
them fail: `python -m tests.faults.defences` shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["OWED", "Patch", "count_tests", "gaps", "patches_of", "row_name"]

# Wrong bytes; serving; disk and memory; operators and neighbours; found while designing.
OWED = (
    *(2, 3, 4, 6, 8, 9),
    *(11, 12, 13, 14, 15, 16, 17, 18, 30, 31, 32, 34),
    *(19, 20, 21, 22, 23, 24, 25, 26, 27, 33, 35, 36, 37, 38, 39),
    *(40, 41, 42, 45, 46),
    *(52, 53, 54, 56, 57, 58, 59, 60),
)
"""Rows that have at least one test and one patch."""

PATCHES = Path("tests", "faults", "defences")
"""Where patches lie in the source tree."""

_PATCH_NAME = re.compile(r"f(\d\d)(?:-[a-z0-9-]+)?\.patch")
_TEST_FILE = re.compile(r"test_f(\d\d)_[a-z0-9_]+\.py")
_TEST = re.compile(r"^\s*(?:async )?def test_f(\d\d)_\w+", re.MULTILINE)
_CHANGED = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)


def row_name(row: int) -> str:
    """A row as it is called in names of tests and patches."""
    return f"f{row:02}"


@dataclass(frozen=True, slots=True)
class Patch:
    """A diff that removes one defence."""

    path: Path
    row: int
    defence: str
    """What it removes, in a sentence; empty where the patch does not say."""
    changed: tuple[str, ...]
    """The files that it changes, by their paths in the source tree."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a patch.

        Raises:
            ValueError: it is not named as patches are.
        """
        name = _PATCH_NAME.fullmatch(path.name)
        if name is None:
            raise ValueError(f"{path} is no name of a patch; expected fNN.patch or fNN-words.patch")
        text = path.read_text(encoding="utf-8")
        head, _, _ = text.partition("diff --git ")
        changed = tuple(dict.fromkeys(name for pair in _CHANGED.findall(text) for name in pair))
        return cls(path, int(name[1]), " ".join(head.split()), changed)


def patches_of(source: Path) -> list[Patch]:
    """All patches of a source tree, by row."""
    paths = sorted((source / PATCHES).glob("*.patch"))
    return sorted((Patch.read(path) for path in paths), key=lambda patch: patch.row)


def count_tests(source: Path) -> dict[int, int]:
    """How many test functions each row has, in the files that are named for it."""
    found: dict[int, int] = {}
    for path in sorted((source / "tests" / "faults").glob("test_f*.py")):
        name = _TEST_FILE.fullmatch(path.name)
        if name is not None:
            named = [int(row) for row in _TEST.findall(path.read_text(encoding="utf-8"))]
            found[int(name[1])] = found.get(int(name[1]), 0) + named.count(int(name[1]))
    return found


def gaps(source: Path) -> list[str]:
    """What is owed and not there."""
    tests = count_tests(source)
    patched = {patch.row for patch in patches_of(source)}
    return [f"{row_name(row)} has no test" for row in OWED if not tests.get(row)] + [
        f"{row_name(row)} has no patch" for row in OWED if row not in patched
    ]
