"""The process that opens a damaged store, reads and verifies all it holds, and stores more."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from random import Random

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, NewBlock
from tiered_kv.errors import TieredKVError
from tiered_kv.testing.conformance.blocks import StoreArguments, aligned_copy, key, page_aligned
from tiered_kv.testing.conformance.children import Opener
from tiered_kv.upkeep import verify
from tiered_kv.values import BlockStatus

__all__ = ["LENGTHS", "Outcome", "content", "fill", "read_for_ever"]

LENGTHS = (9_000, 3_000)
"""Of the blocks of the two KV groups: neither is whole pages."""
_NEW = range(5_000, 5_008)
_DELETED = 10_000
"""Number of the first block that was stored and deleted."""
_BATCH = 8


@dataclass(slots=True)
class Outcome:
    """What became of a store with one flipped bit."""

    right: int = 0
    missing: int = 0
    found: frozenset[int] = frozenset()
    """Blocks that verification found to be other bytes than were stored."""
    served: frozenset[int] = frozenset()
    """Blocks that were handed out with other bytes than were stored, and verified."""
    unreadable: int = 0
    refused: str = ""
    """Why it could not be opened, or did not work further."""
    stored: bool = False
    """Whether further blocks were stored."""
    broke: str = ""
    """An error that is none of ours."""
    stage: str = "open"
    """What was done last, the close apart."""


@cache
def content(number: int) -> bytes:
    """What a block holds."""
    return Random(number).randbytes(LENGTHS[number % 2])


def _new_block(number: int) -> NewBlock:
    return NewBlock(key(number), BlockChecksum.capture(key(number), 0, memoryview(content(number))))


def put(store: BlockStore, numbers: Sequence[int]) -> None:
    """Store blocks in one batch."""
    answers = store.reserve([_new_block(number) for number in numbers])
    given = [(n, place) for n, place in zip(numbers, answers, strict=True) if place is not None]
    places = [place for _, place in given]
    try:
        store.write(places, [aligned_copy(content(number)) for number, _ in given])
        store.publish(places)
    except TieredKVError:
        store.abandon(places)
        raise


def deleted(count: int) -> range:
    """Blocks that were stored and deleted before the others came. An index that is made again from
    what lies in the segments may name them again: with the right bytes."""
    return range(_DELETED, _DELETED + count // 2)


def fill(opener: Opener, arguments: StoreArguments, count: int, left: str) -> None:
    """Make a store that holds blocks 0 to `count`, and pages and slots that are free again; leave
    it as `left` says: "clean", or "killed"."""
    store = opener(arguments)
    before = deleted(count)
    for start in range(0, len(before), _BATCH):
        put(store, before[start : start + _BATCH])
    for start in range(0, count, _BATCH):
        put(store, range(start, start + _BATCH))
    store.delete([key(number) for number in before])
    put(store, range(count - _BATCH, count))
    if left == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


def read_all(store: BlockStore, numbers: Sequence[int], outcome: Outcome) -> None:
    """Read and compare."""
    keys = [key(number) for number in numbers]
    memory = [page_aligned(max(LENGTHS)) for _ in numbers]
    found, served = set(outcome.found), set(outcome.served)
    outcome.right = outcome.missing = outcome.unreadable = 0
    for number, view, result in zip(numbers, memory, store.read(keys, memory), strict=True):
        checksum = result.checksum
        if result.status is BlockStatus.MISSING:
            outcome.missing += 1
        elif result.status is not BlockStatus.OK or checksum is None:
            outcome.unreadable += 1
        elif not checksum.verifies(key(number), 0, view[: checksum.length]):
            found.add(number)
        elif bytes(view[: checksum.length]) == content(number):
            outcome.right += 1
        else:
            served.add(number)
    outcome.found, outcome.served = frozenset(found), frozenset(served)


def look(opener: Opener, arguments: StoreArguments, count: int) -> Outcome:
    """Open, read, verify, store, read again, close."""
    outcome = Outcome()
    numbers = range(count)
    names: Mapping[bytes, int] = {key(number): number for number in numbers}
    try:
        outcome.stage = "open"
        store = opener(arguments)
        try:
            outcome.stage = "verify"
            keys = [key(number) for number in numbers]
            for part in verify(store, keys, rank=0, block_bytes=max(LENGTHS), drop=False):
                outcome.found |= {names[one] for one in part.corrupt}
            outcome.stage = "read"
            read_all(store, numbers, outcome)
            right, missing, unreadable = outcome.right, outcome.missing, outcome.unreadable
            outcome.stage = "scan"
            again = {key(number): number for number in deleted(count)}
            listed = [one for one in store.scan() if one not in names]
            if any(one not in again for one in listed):
                raise RuntimeError(f"among {len(listed)} keys are some that nobody stored")
            read_all(store, [again[one] for one in listed], outcome)
            outcome.stage = "store"
            put(store, _NEW)
            outcome.stored = True
            outcome.stage = "read what was stored"
            read_all(store, _NEW, outcome)
            outcome.stage = "read again"
            read_all(store, numbers, outcome)
            outcome.right, outcome.missing, outcome.unreadable = right, missing, unreadable
        finally:
            store.close()
    except TieredKVError as error:
        outcome.refused = f"{outcome.stage}: {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - whatever else comes out of a store is what is looked for
        outcome.broke = traceback.format_exc()
    return outcome


def read_for_ever(opener: Opener, arguments: StoreArguments, count: int, pipe: Connection) -> None:
    """Child process: looks at the store each time it is asked to."""
    for number in range(count):
        content(number)
    while pipe.recv():
        pipe.send(look(opener, arguments, count))
