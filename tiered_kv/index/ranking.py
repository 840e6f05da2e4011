"""The keys of a namespace in the order of their use."""

from __future__ import annotations

from tiered_kv.index.environment import Environment
from tiered_kv.index.order import Order, name_of, tick_of
from tiered_kv.index.records import BlockRecord
from tiered_kv.index.transactions import Database
from tiered_kv.values import BlockKey

__all__ = ["most_used_first"]

_RECORDS = 1_024


def most_used_first(
    environment: Environment, order: Order, blocks: Database, prefix: bytes
) -> list[BlockKey]:
    """Keys, without their prefix, of all whole blocks of a namespace: the one that would be evicted
    last comes first. About 200 bytes of memory each; holds no transaction for long."""
    found: dict[bytes, tuple[int, int]] = {}
    start: bytes | None = b""
    while start is not None:
        with environment.read() as txn:
            some, start = order.portion(txn, start, _RECORDS)
            for name, keys in some:
                for key in keys:
                    if not key.startswith(prefix):
                        continue
                    record = BlockRecord.unpack(key, txn.get(key, db=blocks))
                    if record is not None and record.whole and name_of(record) == name:
                        # In a class they come in their order; a block that moves meanwhile is met
                        # again behind, where it counts.
                        found.pop(key, None)
                        found[key] = (tick_of(name), len(found))
    ranked = sorted(found, key=found.__getitem__, reverse=True)
    return [BlockKey(key[len(prefix) :]) for key in ranked]
