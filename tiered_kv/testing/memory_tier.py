"""A tier in the memory of this process, for tests: the type `memory`, with faults at every call.

Its bytes survive what would be the end of an engine's process, as those of a disk do, since they
belong to `MemoryTiers`, not to the stores that are opened on them.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import Field

from tiered_kv.checksum import BlockChecksum
from tiered_kv.config import StoreSettings
from tiered_kv.contracts import (
    API_VERSION,
    Backend,
    BlockStore,
    ChangeBatch,
    MaintenanceContext,
    NewBlock,
    Place,
    ReadResult,
    Reconciliation,
    StoreContext,
    StoredNamespace,
    StoreStat,
)
from tiered_kv.errors import NoSpace
from tiered_kv.specs import KeySpec
from tiered_kv.testing.faults import Faults, FaultyStore, Method, Valve
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, Medium, Namespace

__all__ = [
    "MemoryDisk",
    "MemoryMaintenance",
    "MemorySettings",
    "MemorySpec",
    "MemoryStore",
    "MemoryTiers",
]

_MOST_CHANGES = 65_536

Row = tuple[bytes, BlockKey]
"""Namespace id and key."""


@dataclass(frozen=True, slots=True)
class MemorySpec(KeySpec):
    """Blocks in a tier of type `memory`."""

    medium: ClassVar[Medium] = Medium("memory")


class MemorySettings(StoreSettings, frozen=True):
    """A tier of type `memory`."""

    type: Literal["memory"] = Field(default="memory", description="Blocks in a dictionary.")


class MemoryDisk:
    """What the stores of one tier share, all namespaces and ranks together. Thread-safe."""

    def __init__(self) -> None:
        self.faults = Faults()
        """What goes wrong in all stores of this disk."""
        self.lock = threading.RLock()
        self.rows: OrderedDict[Row, dict[int, tuple[bytes, BlockChecksum]]] = OrderedDict()
        """By rank, the parts of each block; least recently used first."""
        self.reserved: dict[object, tuple[Row, int, int]] = {}
        """Row, rank and bytes of each place that was neither published nor abandoned."""
        self.evicted = 0
        self.namespaces: dict[bytes, tuple[Namespace, CacheGeometry]] = {}
        """By id, those that were opened for writing."""
        self.writers: Counter[bytes] = Counter()
        """How many stores are open for writing, by the id of their namespace."""
        self.left: set[object] = set()
        """Which of `reserved` belong to stores that were closed."""
        self._sequence = 0
        self._changes: deque[tuple[int, Row, bool]] = deque(maxlen=_MOST_CHANGES)

    @property
    def reading(self) -> Valve:
        """Every `read` passes it before it copies."""
        return self.faults.at(Method.READ)

    @property
    def writing(self) -> Valve:
        """Every `write` passes it before it copies."""
        return self.faults.at(Method.WRITE)

    @property
    def publishing(self) -> Valve:
        """Every `publish` passes it."""
        return self.faults.at(Method.PUBLISH)

    @property
    def used_bytes(self) -> int:
        """Bytes of all parts and of all places."""
        with self.lock:
            parts = sum(len(data) for row in self.rows.values() for data, _ in row.values())
            return parts + sum(size for _, _, size in self.reserved.values())

    def keys(self) -> set[BlockKey]:
        """Keys of which any part is published, of whatever namespace."""
        with self.lock:
            return {key for _, key in self.rows}

    def content(self, key: BlockKey, rank: int = 0) -> bytes | None:
        """The bytes of a rank's part of a block, whatever its namespace; None without one."""
        with self.lock:
            for (_, known), parts in self.rows.items():
                if known == key and rank in parts:
                    return parts[rank][0]
        return None

    def spoil(self, key: BlockKey) -> None:
        """Flip a bit of every part of a block."""
        with self.lock:
            for (_, known), parts in self.rows.items():
                if known == key:
                    for rank, (data, checksum) in parts.items():
                        parts[rank] = (bytes([data[0] ^ 1]) + data[1:], checksum)

    def note(self, row: Row, *, added: bool) -> None:
        """Put a change into the log; the lock is held."""
        self._sequence += 1
        self._changes.append((self._sequence, row, added))

    def changes(self, namespace: bytes, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        with self.lock:
            now = self._sequence
            if cursor is None:
                return ChangeBatch(now, ())
            first = self._changes[0][0] if self._changes else now + 1
            if cursor + 1 < first:
                return ChangeBatch(now, (), restart=True)
            found = [
                (row[1], added)
                for at, row, added in self._changes
                if at > cursor and row[0] == namespace
            ]
            return ChangeBatch(now, tuple(found))


class MemoryStore:
    """A `BlockStore` on a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, context: StoreContext) -> None:
        self._disk = disk
        self._tier = context.tier
        self._capacity = int(context.settings.capacity)
        self._namespace = context.namespace.id
        self._rank = context.geometry.rank
        self._ranks = context.geometry.world_size
        self._written: dict[object, bytes] = {}
        self._mine: set[object] = set()
        self._writable = context.writable
        if context.writable:
            with disk.lock:
                known = context.namespace, replace(context.geometry, rank=0)
                disk.namespaces[self._namespace] = known
                disk.writers[self._namespace] += 1

    def _row(self, key: BlockKey) -> Row:
        return self._namespace, key

    def _visible(self, key: BlockKey) -> bool:
        return len(self._disk.rows.get(self._row(key), ())) == self._ranks

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is visible."""
        with self._disk.lock:
            return [self._visible(key) for key in keys]

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """Take room, evicting the least recently used blocks.

        Raises:
            NoSpace: not enough can be evicted.
        """
        disk = self._disk
        with disk.lock:
            new = {
                block.key: block
                for block in blocks
                if self._rank not in disk.rows.get(self._row(block.key), {})
            }
            self._make_room(sum(block.checksum.length for block in new.values()), set(new))
            places: list[Place | None] = []
            for block in blocks:
                if block.key not in new:
                    places.append(None)
                    continue
                token = object()
                size = block.checksum.length
                disk.reserved[token] = (self._row(block.key), self._rank, size)
                self._mine.add(token)
                places.append(Place(block, token))
            return places

    def _make_room(self, wanted: int, keep: set[BlockKey]) -> None:
        disk = self._disk
        room = self._capacity - disk.used_bytes
        for row in list(disk.rows):
            if room >= wanted:
                break
            if row[1] not in keep:
                room += sum(len(data) for data, _ in disk.rows[row].values())
                self._drop(row)
                disk.evicted += 1
        if room < wanted:
            raise NoSpace(f"tier {self._tier!r} has no room for {wanted} bytes")

    def _drop(self, row: Row) -> None:
        whole = len(self._disk.rows.pop(row)) == self._ranks
        if whole:
            self._disk.note(row, added=False)

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """Copy the bytes."""
        for place, view in zip(places, memory, strict=True):
            self._written[place.token] = bytes(view)

    def publish(self, places: Sequence[Place]) -> None:
        """Make written parts visible."""
        disk = self._disk
        with disk.lock:
            for place in places:
                data = self._written.pop(place.token)
                row, rank, _ = disk.reserved.pop(place.token)
                self._mine.discard(place.token)
                parts = disk.rows.setdefault(row, {})
                before = len(parts)
                parts.setdefault(rank, (data, place.block.checksum))
                if before < len(parts) == self._ranks:
                    disk.note(row, added=True)

    def abandon(self, places: Sequence[Place]) -> None:
        """Give room back."""
        with self._disk.lock:
            for place in places:
                self._written.pop(place.token, None)
                self._disk.reserved.pop(place.token, None)
                self._mine.discard(place.token)

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """Copy this rank's parts into memory."""
        disk = self._disk
        results: list[ReadResult] = []
        for key, view in zip(keys, memory, strict=True):
            with disk.lock:
                part = disk.rows.get(self._row(key), {}).get(self._rank)
                visible = self._visible(key)
            if part is None or not visible or part[1].length > view.nbytes:
                results.append(ReadResult(BlockStatus.MISSING))
            else:
                view[: len(part[0])] = part[0]
                results.append(ReadResult(BlockStatus.OK, part[1]))
        return results

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """Drop blocks whose row still carries this checksum."""
        with self._disk.lock:
            same = [
                block.key
                for block in blocks
                if (part := self._disk.rows.get(self._row(block.key), {}).get(self._rank))
                and part[1] == block.checksum
            ]
            return self.delete(same)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Drop blocks, all ranks' parts."""
        with self._disk.lock:
            there = [key for key in dict.fromkeys(keys) if self._row(key) in self._disk.rows]
            for key in there:
                self._drop(self._row(key))
            return len(there)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark as recently used."""
        with self._disk.lock:
            for key in keys:
                if self._row(key) in self._disk.rows:
                    self._disk.rows.move_to_end(self._row(key))

    def scan(self) -> Iterator[BlockKey]:
        """All visible keys of this namespace."""
        with self._disk.lock:
            mine = [key for namespace, key in self._disk.rows if namespace == self._namespace]
            return iter([key for key in mine if self._visible(key)])

    def changes(self, cursor: int | None) -> ChangeBatch:
        """Changes since a cursor."""
        return self._disk.changes(self._namespace, cursor)

    def stat(self) -> StoreStat:
        """A snapshot."""
        return StoreStat(
            len(list(self.scan())),
            self._disk.used_bytes,
            self._capacity,
            self._disk.evicted,
            {"io": "memory"},
        )

    def close(self) -> None:
        """The bytes are the disk's and stay, places that were not published too, as if the process
        had been killed. Idempotent."""
        with self._disk.lock:
            if self._writable:
                self._writable = False
                self._disk.writers[self._namespace] -= 1
            self._disk.left |= self._mine
            self._mine.clear()


class MemoryMaintenance:
    """A `StoreMaintenance` of a `MemoryDisk`."""

    def __init__(self, disk: MemoryDisk, context: MaintenanceContext) -> None:
        self._disk = disk
        self._tier = context.tier
        self._writable = context.writable

    def _check_writable(self) -> None:
        if not self._writable:
            raise ValueError(f"tier {self._tier!r} was opened for looking only")

    def namespaces(self) -> list[StoredNamespace]:
        """What lies there, sorted by namespace id."""
        disk = self._disk
        with disk.lock:
            held = {of: [p for (o, _), p in disk.rows.items() if o == of] for of in disk.namespaces}
            return [
                StoredNamespace(
                    namespace,
                    geometry,
                    sum(len(parts) == geometry.world_size for parts in held[of]),
                    sum(len(data) for parts in held[of] for data, _ in parts.values()),
                    disk.writers[of] > 0,
                )
                for of, (namespace, geometry) in sorted(disk.namespaces.items())
            ]

    def reconcile(self, *, repair: bool) -> Reconciliation:
        """Find the places that closed stores neither published nor abandoned."""
        if repair:
            self._check_writable()
        disk = self._disk
        with disk.lock:
            disk.left &= disk.reserved.keys()
            found = {"places of closed stores": len(disk.left)} if disk.left else {}
            if repair:
                for token in disk.left:
                    del disk.reserved[token]
                disk.left.clear()
        return Reconciliation(found, dict(found) if repair else {})

    def drop(self, namespace_id: bytes) -> int:
        """Remove every block of a namespace."""
        self._check_writable()
        disk = self._disk
        with disk.lock:
            if disk.writers[namespace_id]:
                raise ValueError(f"namespace {namespace_id.hex()} is in use")
            known = disk.namespaces.pop(namespace_id, None)
            rows = [row for row in disk.rows if row[0] == namespace_id]
            for row in rows:
                parts = disk.rows.pop(row)
                if known is not None and len(parts) == known[1].world_size:
                    disk.note(row, added=False)
            return len(rows)

    def close(self) -> None:
        """Nothing to let go of."""


class MemoryTiers:
    """The tiers of type `memory` of one test: a disk for each name, and the backend for all."""

    def __init__(self) -> None:
        self._disks: dict[str, MemoryDisk] = {}
        self._lock = threading.Lock()
        self.backend = Backend(
            name="memory",
            medium=MemorySpec.medium,
            api_version=API_VERSION,
            description="Blocks in a dictionary, for tests.",
            settings=lambda: MemorySettings,
            spec=MemorySpec,
            open_store=self._open,
            open_maintenance=self._look_after,
        )

    def _open(self, context: StoreContext) -> BlockStore:
        disk = self.disk(context.tier)
        return FaultyStore(MemoryStore(disk, context), disk.faults)

    def _look_after(self, context: MaintenanceContext) -> MemoryMaintenance:
        return MemoryMaintenance(self.disk(context.tier), context)

    def disk(self, tier: str) -> MemoryDisk:
        """The disk of a tier."""
        with self._lock:
            return self._disks.setdefault(tier, MemoryDisk())
