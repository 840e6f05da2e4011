"""The sentences of the contracts that the suites prove, quoted by a failure.

Each is copied word for word from a docstring of `tiered_kv.contracts`, `tiered_kv.specs` or
`tiered_kv.values`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Self

__all__ = [
    "BrokenPromise",
    "HandlerPromise",
    "MaintenancePromise",
    "StorePromise",
    "owe",
    "refused",
]


class BrokenPromise(AssertionError):
    """A backend does not do what its contract says."""

    @classmethod
    def of(cls, promise: StrEnum, found: str) -> Self:
        """The promise, and what was found instead, for the author of the backend."""
        return cls(f'the contract says "{promise}", but {found}')


class StorePromise(StrEnum):
    """What `tiered_kv.contracts.store` says."""

    THREADS = "several at once: a store is thread-safe"
    PROCESSES = (
        "Several processes may have the same directory open; `contains`, `read` and `publish` stay "
        "right then."
    )
    EMPTY = "an empty batch is allowed and does nothing"
    ONE_NAMESPACE = "One object serves one namespace and one rank"
    ALL_RANKS = "only when the parts of all ranks are published"
    ERRORS = (
        "They raise `TierError` when the tier does not work, `NoSpace` when there is no room, "
        "`ValueError` when the caller breaks the contract."
    )
    READ_ONLY = (
        "A store that was opened with `writable=False` refuses with `ValueError` whatever would "
        "change its blocks"
    )
    CLOSED = "a closed store raises `TierError`"
    BUDGET = (
        "What it takes on the disk stays within its capacity, counting what lay in its directory "
        "before."
    )
    OUTLIVES = (
        "What was published outlives its process, however that ends, as far as the medium is "
        "durable"
    )
    NOTHING_BEHIND = "what was not published leaves nothing behind then"
    ROW_CHECKSUM = "What the row says the bytes must be; set where status is OK."
    CHANGE_ORDER = "(key, True) added, (key, False) removed, in order."
    RESTART = (
        "The log no longer reaches back to the cursor: forget everything, `scan`, go on from here."
    )
    STAT_BLOCKS = "Visible blocks of this namespace."
    STAT_USED = (
        "Bytes on the disk that count against the budget: data, index and files found before."
    )
    STAT_EVICTED = "Blocks evicted by this process."
    CONTAINS = "Whether each block is visible."
    EVICTS_WHOLE = "Take room for this rank's parts, evicting whole blocks if needed."
    ONE_ANSWER_EACH = "The answer has one entry per block"
    ALREADY = "None where this rank's part is already published"
    ALL_OR_NOTHING = "What does not fit raises: all or nothing."
    WRITE = "Copy the bytes to the places."
    PUBLISH = "Make written places visible in one transaction"
    PUBLISH_WRITTEN = "A place that was not written is refused."
    TWO_WRITERS = (
        "Publishing a key that another process published meanwhile keeps one of the two and gives "
        "the other's room back."
    )
    ABANDON = "Give room back; nothing was or will be visible."
    READ = "Copy this rank's parts into memory."
    READ_BEHIND = "Nothing behind the block's bytes is written."
    READ_RACE = "a row that changed while its bytes were read is MISSING"
    READ_SHORT = "A row whose length exceeds `memory[i]` is MISSING."
    DISCARD = "Drop blocks (all ranks' parts) whose row still carries this checksum; how many were."
    DELETE = "Drop blocks (all ranks' parts) of this namespace; how many were there."
    TOUCH = "Mark as recently used."
    SCAN = "All visible keys of this namespace, in any order, without reading values."
    CHANGES = "Changes since `cursor`; with None an empty batch whose cursor is now."
    CLOSE = "Write what is batched, set the clean-shutdown mark, let go. Idempotent."


class MaintenancePromise(StrEnum):
    """What `tiered_kv.contracts.maintenance` says."""

    EVER_OPENED = (
        "A namespace that was ever opened for writing in a tier's directory and not dropped since."
    )
    GEOMETRY = "What its blocks are, as of rank 0."
    BLOCKS = "Visible blocks."
    USED = "Bytes of the parts of its blocks, whole or not."
    IN_USE = "Whether a live process has it open for writing."
    SOUND = "Zero counts are left out, so that a sound tier's is empty."
    REPAIR = (
        "With `repair`, leftovers of dead processes are removed and rows that lead nowhere are "
        "dropped"
    )
    REPAIR_WRITABLE = "`repair` where it was opened with `writable=False`."
    DROP = "Remove every block of a namespace, whole or not, and the record of it"
    ROOM = "give its room back to the file system as far as the medium can"
    NOT_THERE = "A namespace that is not there is 0."
    NOT_DROPPED = "it was opened with `writable=False`, or the namespace is in use."
    BESIDE = "They are safe beside running engines."


class HandlerPromise(StrEnum):
    """What `tiered_kv.contracts.handler` and `tiered_kv.specs` say."""

    PER_BLOCK = "Move the blocks; answer per block."
    IN_ORDER = "One per block, in the order of the spec."
    COPIED = "Bytes that were really copied, counted where they are copied."
    OK_MEANS_THERE = "OK only where every byte is in place"
    VERIFIED_FIRST = "was verified against its checksum before the first byte is written"
    EQUALLY_LONG = "`src`, `dst` and `keys` are not equally long."
    CLOSED = "the whole tier does not work, or the handler was closed"
    CLOSE = "Let go of resources; no call is running. Idempotent."
    MODES = "What is in effect, for logs, `check` and stats"
    RETURNS_LAST = "The call returns only when no copy of it can read or write the memory any more"
    GOES_ON = (
        "if the awaiting task is cancelled it goes on in its threads and the caller keeps the slots"
    )
    COMMIT = "Asked once per call, right before the step that cannot be taken back"
    COMMIT_WHEN = "before a load's last copy and after a store's gather"
    GIVEN_UP = "the job was given up, and the blocks are CANCELLED and leave no trace"
    EXECUTOR = "Blocking calls go to the context's executor, once per call, never once per block."
    BEGIN_BIND = (
        "A slot's bytes are written between `begin` and `bind`, and read only under the generation "
        "that it was given out with."
    )
    STALE_BEGIN = "the caller's use of it is over (status CANCELLED)"
    STALE_READ = "None means that they may have changed meanwhile."
    TIER_ERROR = "the whole tier does not work"
    NO_SPACE = "A store found no room."
    MISSING = "Not stored (any more)."
    CORRUPT = "Bytes differ from what was captured; the row was dropped."
    PARTIAL = "Fewer than the group's chunk where only a part of the block is wanted."
    CHECKSUM = "Bound at capture; it carries the length in bytes."


def owe(kept: object, promise: StrEnum, found: str) -> None:
    """Fail unless `kept` is true.

    Args:
        kept: whether the promise was kept.
        promise: the sentence that was to be proved.
        found: what was found instead, for the author of the backend.

    Raises:
        BrokenPromise: it was not kept.
    """
    if not kept:
        raise BrokenPromise.of(promise, found)


def refused(call: Callable[[], object], error: type[Exception], promise: StrEnum) -> None:
    """Fail unless the call raises `error`.

    Raises:
        BrokenPromise: it raised nothing, or another error.
    """
    try:
        answer = call()
    except error:
        return
    except Exception as other:
        found = f"a call raised {other!r} where {error.__name__} is due"
        raise BrokenPromise.of(promise, found) from other
    owe(False, promise, f"a call answered {answer!r} where {error.__name__} is due")
