"""What is looked at after each round, in a process of its own, when all others have ended."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
from lmdb import verify

from tests.faults.torture.blocks import BATCH, BLOCK_BYTES, Writer
from tests.faults.torture.board import Count, short
from tests.faults.torture.worker import judged
from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import disk_bytes, key, page_aligned

__all__ = ["Known", "Verdict", "check"]

_WARNINGS = ("starts empty", "damaged", "not closed cleanly", "without a row", "corrupt")
_READ_AT_ONCE = 32
_DIGITS = re.compile(r"\d+")
_LEFTOVER_DATABASES = (b"reserved", b"owners")


@dataclass(frozen=True, slots=True)
class Known:
    """What was there before a round, by the first number of each namespace."""

    visible: dict[int, frozenset[int]] = field(default_factory=dict)
    cursors: dict[int, int] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """Files, with their numbers taken out."""
    files: int = 0


@dataclass(slots=True)
class Verdict:
    """What was found."""

    known: Known
    """For the next round."""
    problems: list[str] = field(default_factory=list)
    wrong: int = 0
    """Blocks that verified, and were not the true content."""
    lost: int = 0
    """Blocks that were committed, not removed since, and cannot be read."""
    verified: int = 0
    """Blocks that were read whole."""
    promised: int = 0
    """Parts of blocks whose publication had returned, and that nobody removed."""
    restarts: int = 0
    """Change logs that did not reach back."""
    disk_bytes: int = 0
    """The most on the disk that was seen."""
    clean_bytes: int = 0
    """On the disk after the last close."""
    blocks: int = 0
    """Visible blocks of all namespaces."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _hearing() -> Iterator[_Heard]:
    heard = _Heard()
    logging.getLogger().addHandler(heard)
    try:
        yield heard
    finally:
        logging.getLogger().removeHandler(heard)


def check(
    path: Path,
    writers: Sequence[Writer],
    acknowledged: Sequence[Sequence[int]],
    removed: Set[int],
    known: Known,
    stored_before: int,
) -> Verdict:
    """Look at a store that nobody has open.

    Args:
        path: its directory.
        writers: those that it was opened by.
        acknowledged: by writer, the blocks whose publication had returned, this round.
        removed: the blocks that somebody was about to remove, see `short`.
        known: what was there before.
        stored_before: numbers below, counted from the namespace's first, may be there.
    """
    verdict = Verdict(Known())
    verdict.disk_bytes = disk_bytes(path)
    for data in sorted(path.rglob("data.mdb")):
        for problem in verify.verify(str(data), subdir=False):  # type: ignore[no-untyped-call]
            verdict.problems.append(f"{data.relative_to(path)}: {problem}")
    with _hearing() as heard:
        stores = [writer.opener(writer.arguments) for writer in writers]
        verdict.disk_bytes = max(verdict.disk_bytes, disk_bytes(path))
        for first in sorted({writer.first for writer in writers}):
            mine = [
                (writer, store, set(acked))
                for writer, store, acked in zip(writers, stores, acknowledged, strict=True)
                if writer.first == first
            ]
            _check_namespace(verdict, first, mine, removed, known, stored_before)
        for store in stores:
            store.close()
    told = [line for line in heard.lines if any(word in line for word in _WARNINGS)]
    verdict.problems += [f"a store says: {line}" for line in told]
    _check_files(verdict, path, writers[0].arguments.capacity, known)
    return verdict


def _check_namespace(
    verdict: Verdict,
    first: int,
    mine: Sequence[tuple[Writer, BlockStore, set[int]]],
    removed: Set[int],
    known: Known,
    stored_before: int,
) -> None:
    store = mine[0][1]
    numbers = {key(number): number for number in range(first, first + stored_before + 2 * BATCH)}
    scanned = list(store.scan())
    visible = {numbers.get(one, -1) for one in scanned}
    verdict.blocks += len(scanned)
    if len(visible) != len(scanned) or -1 in visible:
        verdict.problems.append(f"{len(scanned)} keys are visible, among them unknown ones")
    if store.stat().blocks != len(scanned):
        verdict.problems.append(f"{store.stat().blocks} blocks are counted of {len(scanned)}")
    batch = store.changes(known.cursors.get(first))
    before = known.visible.get(first, frozenset())
    if batch.restart:
        verdict.restarts += 1
    elif first in known.cursors:
        expected = set(before)
        for name, is_added in batch.changes:
            (expected.add if is_added else expected.discard)(numbers[name])
        if expected != visible:
            odd = sorted(expected ^ visible)
            verdict.problems.append(f"the change log and the index differ in {len(odd)}: {odd[:9]}")
    removable = {numbers[name] for name in numbers if short(name) in removed}
    gone = before - removable - visible
    if gone:
        verdict.lost += len(gone)
        verdict.problems.append(f"{len(gone)} blocks went that nobody removed: {sorted(gone)[:9]}")
    kept = [acked - removable for _, _, acked in mine]
    unseen = set.intersection(*kept) - visible
    if unseen:
        verdict.problems.append(f"published by all ranks, not visible: {sorted(unseen)[:9]}")
    for (writer, store, _), promised in zip(mine, kept, strict=True):
        verdict.promised += len(promised)
        _read_all(verdict, writer, store, sorted((visible | promised) - {-1}))
    verdict.known.visible[first] = frozenset(visible)
    verdict.known.cursors[first] = store.changes(None).cursor


def _read_all(verdict: Verdict, writer: Writer, store: BlockStore, numbers: list[int]) -> None:
    memory = [page_aligned(max(BLOCK_BYTES)) for _ in range(_READ_AT_ONCE)]
    for start in range(0, len(numbers), _READ_AT_ONCE):
        part = numbers[start : start + _READ_AT_ONCE]
        views = memory[: len(part)]
        for number, view, result in zip(
            part, views, store.read([key(n) for n in part], views), strict=True
        ):
            found = judged(number, writer.rank, view, result)
            if found is Count.LOADED:
                verdict.verified += 1
            elif found is Count.WRONG:
                verdict.wrong += 1
            else:
                verdict.lost += 1
                verdict.problems.append(
                    f"block {number} of rank {writer.rank} was published, and is {found.name}"
                )


def _check_files(verdict: Verdict, path: Path, capacity: int, known: Known) -> None:
    verdict.clean_bytes = disk_bytes(path)
    if max(verdict.clean_bytes, verdict.disk_bytes) > capacity:
        verdict.problems.append(f"{verdict.disk_bytes} bytes on the disk, of {capacity} allowed")
    files = [str(file.relative_to(path)) for file in path.rglob("*")]
    kinds = Counter(_DIGITS.sub("N", name) for name in files)
    names = tuple(sorted(kinds))
    if known.names and not set(names) <= set(known.names):
        verdict.problems.append(f"new kinds of files: {set(names) - set(known.names)}")
    many = {name: count for name, count in kinds.items() if count > 1 and "segment" not in name}
    if many:
        verdict.problems.append(f"files gather: {many}")
    verdict.known = Known(
        verdict.known.visible, verdict.known.cursors, known.names or names, len(files)
    )
    for data in sorted(path.rglob("data.mdb")):
        for name, entries in _leftovers(data).items():
            if entries:
                verdict.problems.append(f"{data.relative_to(path)}: {entries} entries in {name!r}")


def _leftovers(data: Path) -> dict[bytes, int]:
    """Entries of the databases that hold something only while a store is open."""
    found: dict[bytes, int] = {}
    options: dict[str, Any] = {"subdir": False, "readonly": True, "lock": False, "max_dbs": 24}
    with lmdb.Environment(str(data), **options) as environment, environment.begin() as txn:
        names = list(txn.cursor().iternext(values=False))
        for name in names:
            if name in _LEFTOVER_DATABASES:
                found[name] = txn.stat(environment.open_db(name, txn, create=False))["entries"]
    return found
