"""The change log of one tier, and the counters beside it, in the environment's `meta`.

A key is logged as added when the last rank's row of its block comes, and as removed when its first
row goes. Keys that came, or went, together are one entry under the number of the last of them.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from tiered_kv.contracts import ChangeBatch
from tiered_kv.index.environment import Environment, Transaction
from tiered_kv.values import BlockKey

__all__ = ["ChangeLog", "Counters", "number_bytes"]

_NAMESPACE_BYTES = 8
_NUMBER_BYTES = 8
_LAST = b"log"
_LENGTH = struct.Struct(">H")
_namespace_of = itemgetter(slice(_NAMESPACE_BYTES))
_BEYOND: dict[bytes, Callable[[], int]] = {
    b"tick": time.time_ns,
    b"generation": time.time_ns,
    _LAST: time.time_ns,
    b"class": lambda: int(time.time()),  # has 4 bytes
}
"""By counter, a number that counting does not reach."""


def number_bytes(value: int) -> bytes:
    """8 bytes that sort as the numbers do."""
    return value.to_bytes(_NUMBER_BYTES, "big")


class Counters:
    """Named numbers. Each call belongs to a transaction."""

    def __init__(self, environment: Environment) -> None:
        """Not inside a transaction."""
        self._meta = environment.database("meta")

    def get(self, txn: Transaction, name: bytes) -> int:
        """0 where it was never set. Of one that was damaged, as its length tells, more than was
        ever counted, so that no number is given out twice."""
        data = txn.get(name, db=self._meta)
        if data is None:
            return 0
        if len(data) != _NUMBER_BYTES:
            return _BEYOND.get(name, lambda: 0)()
        return int.from_bytes(data, "big")

    def set(self, txn: Transaction, name: bytes, value: int) -> None:
        """Set it."""
        txn.put(name, number_bytes(value), db=self._meta)

    def advance(self, txn: Transaction, name: bytes, count: int) -> int:
        """Add to it; its value before."""
        before = self.get(txn, name)
        if count:
            self.set(txn, name, before + count)
        return before

    def moment(self, txn: Transaction) -> int:
        """The time in nanoseconds; later than every one given before."""
        moment = max(time.time_ns(), self.get(txn, b"tick") + 1)
        self.set(txn, b"tick", moment)
        return moment


class ChangeLog:
    """Which keys became visible, and which went. Each call belongs to a transaction."""

    def __init__(self, environment: Environment, counters: Counters, most: int) -> None:
        """Keeps the last `most` entries. Not inside a transaction."""
        self._entries = environment.database("log")
        self._counters = counters
        self._most = most

    def begin(self, txn: Transaction) -> None:
        """Number the entries of a new log from the time on, so that a cursor from before the
        environment was emptied is told from one of now."""
        if self._counters.get(txn, _LAST) == 0:
            self._counters.set(txn, _LAST, time.time_ns())

    def begun(self, txn: Transaction) -> bool:
        """Whether `begin` was called."""
        return self._counters.get(txn, _LAST) != 0

    def note(self, txn: Transaction, keys: Sequence[bytes], *, added: bool) -> None:
        """Full keys that became visible, or went; counts them by namespace."""
        if not keys:
            return
        last = self._counters.advance(txn, _LAST, len(keys)) + len(keys)
        entry = bytes([added]) + b"".join([_LENGTH.pack(len(key)) + key for key in keys])
        txn.put(number_bytes(last), entry, db=self._entries)
        sign = 1 if added else -1
        for namespace, count in Counter(map(_namespace_of, keys)).items():
            whole = self.visible(txn, namespace) + sign * count
            self._counters.set(txn, b"whole:" + namespace, max(0, whole))

    def visible(self, txn: Transaction, namespace: bytes) -> int:
        """How many keys of a namespace are visible."""
        return self._counters.get(txn, b"whole:" + namespace)

    def trim(self, txn: Transaction) -> None:
        """Drop what is too old."""
        oldest = self._counters.get(txn, _LAST) - self._most
        with txn.cursor(self._entries) as cursor:
            more = cursor.first()
            while more and int.from_bytes(cursor.key(), "big") <= oldest:
                more = cursor.delete() and cursor.key() != b""

    def since(self, txn: Transaction, cursor: int | None, namespace: bytes) -> ChangeBatch:
        """See `BlockStore.changes`."""
        last = self._counters.get(txn, _LAST)
        if cursor is None or cursor == last:
            return ChangeBatch(last, ())
        with txn.cursor(self._entries) as entries:
            first = self._first(entries.item()) if entries.first() else last + 1
            if not first - 1 <= cursor < last:
                return ChangeBatch(last, (), restart=True)
            entries.set_range(number_bytes(cursor + 1))
            found = [value for _, value in entries.iternext()]
        return ChangeBatch(
            last,
            tuple(
                (BlockKey(key[_NAMESPACE_BYTES:]), entry[0] == 1)
                for entry in found
                for key in _keys(entry)
                if key.startswith(namespace)
            ),
        )

    @staticmethod
    def _first(item: tuple[bytes, bytes]) -> int:
        """Number of the first key of an entry."""
        name, entry = item
        return int.from_bytes(name, "big") - sum(1 for _ in _keys(entry)) + 1

    def restart(self, txn: Transaction) -> None:
        """Nothing is visible any more; whoever follows the log is asked to start again."""
        txn.drop(self._entries, delete=False)
        last = self._counters.get(txn, _LAST)
        self._counters.set(txn, _LAST, max(time.time_ns(), last + 2))


def _keys(entry: bytes) -> Iterator[bytes]:
    """The full keys of an entry."""
    place = 1
    while place < len(entry):
        (length,) = _LENGTH.unpack_from(entry, place)
        place += _LENGTH.size
        yield entry[place : place + length]
        place += length
