"""The one place that opens LMDB: durable index of a store, its change log, and the mirror.

`Environment` opens a directory once per process and keeps it safe to use; `BlockIndex` is what
lies where in one tier; `Owner` names the process that holds reserved room, `Owners` those that have
a tier open for writing; `Mirror` answers the scheduler from memory.
"""

from tiered_kv.index.account import WriteAccount, Written
from tiered_kv.index.auditing import IndexAudit, Parts
from tiered_kv.index.blocks import BlockIndex, FullKey
from tiered_kv.index.classes import SlotClass
from tiered_kv.index.directory import (
    bytes_beside_data,
    data_bytes,
    directory_lock,
    try_lock,
    unlock,
)
from tiered_kv.index.environment import (
    BufferTransaction,
    Database,
    Environment,
    Transaction,
)
from tiered_kv.index.holdings import Holdings
from tiered_kv.index.keyset import KeySet
from tiered_kv.index.mirror import Mirror
from tiered_kv.index.namespaces import describe as describe_namespace
from tiered_kv.index.namespaces import understand as understand_namespace
from tiered_kv.index.owners import Owner, Owners
from tiered_kv.index.records import Row
from tiered_kv.index.translation import OutOfPages
from tiered_kv.index.trust import Trust
from tiered_kv.index.vetting import Emptied
from tiered_kv.index.writemap import Durability, WriteMap

__all__ = [
    "BlockIndex",
    "BufferTransaction",
    "Database",
    "Durability",
    "Emptied",
    "Environment",
    "FullKey",
    "Holdings",
    "IndexAudit",
    "KeySet",
    "Mirror",
    "OutOfPages",
    "Owner",
    "Owners",
    "Parts",
    "Row",
    "SlotClass",
    "Transaction",
    "Trust",
    "WriteAccount",
    "WriteMap",
    "Written",
    "bytes_beside_data",
    "data_bytes",
    "describe_namespace",
    "directory_lock",
    "try_lock",
    "understand_namespace",
    "unlock",
]
