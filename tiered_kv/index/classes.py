"""Slot classes of one tier: numbered once, with the count of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiered_kv.index.environment import Environment, Transaction
from tiered_kv.index.log import Counters, number_bytes
from tiered_kv.index.records import ClassRecord

__all__ = ["SlotClass", "SlotClasses"]

_CLASS_BYTES = 4
_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Blocks that can take each other's place: one namespace, group and slot size."""

    number: int
    namespace_id: bytes
    group: int
    slot_bytes: int
    blocks: int
    """Blocks in it, whole or not."""
    oldest: int | None
    """Tick of the least recently used one (a smaller tick is longer ago); None when empty."""


class SlotClasses:
    """The classes of all namespaces. Each call belongs to a transaction."""

    def __init__(self, environment: Environment, counters: Counters) -> None:
        """Not inside a transaction."""
        self._records = environment.database("classes")
        self._order = environment.database("order")
        self._counters = counters

    def number(self, txn: Transaction, namespace_id: bytes, group: int, slot_bytes: int) -> int:
        """Stable number (from 1) of (namespace, group, slot bytes); made when new, which needs a
        write transaction. 0 is free for stores that have no classes."""
        name = namespace_id + group.to_bytes(_CLASS_BYTES, "big") + number_bytes(slot_bytes)
        known = txn.get(name, db=self._records)
        if known is not None:
            return int.from_bytes(known, "big")
        number = self._counters.advance(txn, b"class", 1) + 1
        packed = number.to_bytes(_CLASS_BYTES, "big")
        txn.put(name, packed, db=self._records)
        record = ClassRecord(namespace_id, group, slot_bytes, 0)
        txn.put(packed, record.pack(), db=self._records)
        return number

    def all(self, txn: Transaction) -> list[SlotClass]:
        """Every class that was ever numbered."""
        found: list[SlotClass] = []
        with txn.cursor(self._records) as cursor, txn.cursor(self._order) as order:
            for name, data in cursor:
                if len(name) != _CLASS_BYTES:
                    continue
                record = ClassRecord.unpack(data)
                oldest = None
                if order.set_range(name) and order.key().startswith(name):
                    tick = order.key()[_CLASS_BYTES : _CLASS_BYTES + _NUMBER_BYTES]
                    oldest = int.from_bytes(tick, "big")
                found.append(
                    SlotClass(
                        int.from_bytes(name, "big"),
                        record.namespace_id,
                        record.group,
                        record.slot_bytes,
                        record.blocks,
                        oldest,
                    )
                )
        return found

    def add(self, txn: Transaction, differences: Mapping[int, int]) -> None:
        """Count blocks that came or went, by class (write transaction)."""
        for slot_class, difference in differences.items():
            name = slot_class.to_bytes(_CLASS_BYTES, "big")
            data = txn.get(name, db=self._records)
            if data is not None:
                record = ClassRecord.unpack(data)
                changed = replace(record, blocks=max(0, record.blocks + difference))
                txn.put(name, changed.pack(), db=self._records)
