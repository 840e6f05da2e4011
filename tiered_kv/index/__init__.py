"""The one place that opens LMDB: durable index of a store, its change log, and the mirror.

`Environment` opens a directory once per process and keeps it safe to use; `BlockIndex` is what
lies where in one tier; `Owner` names the process that holds reserved room; `Mirror` answers the
scheduler from memory.
"""

from tiered_kv.index.blocks import BlockIndex, FullKey, SlotClass
from tiered_kv.index.directory import bytes_beside_data, data_bytes
from tiered_kv.index.environment import (
    BufferTransaction,
    Database,
    Environment,
    Transaction,
)
from tiered_kv.index.holdings import Holdings
from tiered_kv.index.mirror import Mirror
from tiered_kv.index.owners import Owner
from tiered_kv.index.records import Row
from tiered_kv.index.translation import OutOfPages
from tiered_kv.index.writemap import Durability, WriteMap

__all__ = [
    "BlockIndex",
    "BufferTransaction",
    "Database",
    "Durability",
    "Environment",
    "FullKey",
    "Holdings",
    "Mirror",
    "OutOfPages",
    "Owner",
    "Row",
    "SlotClass",
    "Transaction",
    "WriteMap",
    "bytes_beside_data",
    "data_bytes",
]
