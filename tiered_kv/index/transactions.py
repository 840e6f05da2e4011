"""Names of LMDB's types, as the type checker is to see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import lmdb

__all__ = ["BufferTransaction", "Database", "Transaction"]

if TYPE_CHECKING:
    Transaction: TypeAlias = lmdb.Transaction[bytes]
    BufferTransaction: TypeAlias = lmdb.Transaction[memoryview]
    Database: TypeAlias = lmdb._Database
else:
    Transaction = lmdb.Transaction
    BufferTransaction = lmdb.Transaction
    Database = object
