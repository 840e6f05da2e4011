"""Which processes use a tier, or hold reserved room in it, and whether they still live."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Self

from tiered_kv.index.transactions import Database, Transaction

__all__ = ["Owner", "Owners", "boot_id"]

_PACKED = struct.Struct(">16sQIQd")
_UNJUDGED_SECONDS = 600.0
_NAMESPACE_BYTES = 8


@lru_cache(maxsize=1)
def boot_id() -> bytes:
    """16 bytes that change whenever the machine starts."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return bytes.fromhex(text.strip().replace("-", ""))


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, named so that another process can tell whether it still runs."""

    PACKED_BYTES: ClassVar[int] = _PACKED.size

    boot: bytes
    """16 bytes, see `boot_id`."""
    pid_namespace: int
    """Inode of the pid namespace: a pid means nothing outside of it."""
    pid: int
    started: int
    """Start of the process in clock ticks since boot; tells a reused pid."""
    since: float
    """Seconds since the epoch when this value was made."""

    @classmethod
    def current(cls) -> Self:
        """This process, now."""
        pid = os.getpid()
        started = _started(pid)
        return cls(boot_id(), _pid_namespace(), pid, started or 0, time.time())

    def alive(self) -> bool:
        """Whether the process still runs.

        A process of another pid namespace (a container that shares the directory) can't be looked
        up: it counts as alive for ten minutes from `since`. A wrong answer costs its owner a
        store, nothing else, since room is asked for again in the transaction that publishes.
        """
        if self.boot != boot_id():
            return False
        if self.pid_namespace != _pid_namespace():
            return time.time() - self.since < _UNJUDGED_SECONDS
        return _started(self.pid) == self.started

    def pack(self) -> bytes:
        """`PACKED_BYTES` bytes for a record on disk."""
        return _PACKED.pack(self.boot, self.pid_namespace, self.pid, self.started, self.since)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """The inverse of `pack`.

        Raises:
            ValueError: `data` has another length.
        """
        if len(data) != _PACKED.size:
            raise ValueError(f"an owner is {_PACKED.size} bytes, not {len(data)}")
        return cls(*_PACKED.unpack(data))


@dataclass(frozen=True, slots=True)
class Owners:
    """Which processes have a tier open for writing: a record per store that stores.

    Key: the store's nonce. Value: its process, and the id of its namespace. Records of a wrong
    length are passed over. Each call belongs to a transaction.
    """

    database: Database

    def register(self, txn: Transaction, nonce: bytes, namespace_id: bytes) -> None:
        """Say that this process has the namespace open for writing (write transaction)."""
        txn.put(nonce, Owner.current().pack() + namespace_id, db=self.database)

    def forget(self, txn: Transaction, nonce: bytes) -> None:
        """It has it open no more (write transaction)."""
        txn.delete(nonce, db=self.database)

    def live_namespaces(self, txn: Transaction) -> set[bytes]:
        """Ids of the namespaces that some live process has open for writing."""
        return {namespace for _, owner, namespace in self._all(txn) if owner.alive()}

    def dead(self, txn: Transaction) -> list[bytes]:
        """Nonces of processes that do not run any more."""
        return [nonce for nonce, owner, _ in self._all(txn) if not owner.alive()]

    def _all(self, txn: Transaction) -> list[tuple[bytes, Owner, bytes]]:
        size = Owner.PACKED_BYTES
        with txn.cursor(self.database) as cursor:
            return [
                (nonce, Owner.unpack(value[:size]), value[size:])
                for nonce, value in cursor
                if len(value) == size + _NAMESPACE_BYTES
            ]


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when no such process runs."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
