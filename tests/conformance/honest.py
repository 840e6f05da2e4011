"""A store in memory, as plain as can be, that keeps every promise; saboteurs break one each."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import (
    ChangeBatch,
    NewBlock,
    Place,
    ReadResult,
    Reconciliation,
    StoredNamespace,
    StoreStat,
)
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.testing.conformance.blocks import StoreArguments
from tiered_kv.testing.conformance.stores import StoreCase
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, Namespace

Name = tuple[bytes, BlockKey]
OVERHEAD = 256


@dataclass
class Part:
    data: bytes
    checksum: BlockChecksum

    @property
    def cost(self) -> int:
        return len(self.data) + OVERHEAD


@dataclass
class Token:
    cost: int
    data: bytes | None = None


@dataclass
class Shelf:
    """What all stores of one directory share."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    blocks: dict[Name, dict[int, Part]] = field(default_factory=dict)
    """In the order of their use."""
    log: list[tuple[Name, bool]] = field(default_factory=list)
    known: dict[bytes, tuple[Namespace, CacheGeometry]] = field(default_factory=dict)
    """What was opened for writing, by the namespace's id."""
    writers: list[HonestStore] = field(default_factory=list)


SHELVES: dict[Path, Shelf] = {}


class HonestStore:
    def __init__(self, arguments: StoreArguments) -> None:
        self.arguments = arguments
        self.shelf = SHELVES.setdefault(arguments.path, Shelf())
        self.namespace = arguments.namespace.id
        self.ranks = range(arguments.world_size)
        self.open_tokens: list[Token] = []
        self.evicted = 0
        self.closed = False
        self.pid = os.getpid()
        if arguments.writable:
            geometry = arguments.with_(rank=0).geometry
            self.shelf.known[self.namespace] = (arguments.namespace, geometry)
            self.shelf.writers.append(self)

    # ------------------------------------------------------------------------------- the door

    def check(self, *, changing: bool = False) -> None:
        if os.getpid() != self.pid:
            raise TierError("this store was opened before a fork", tier="memory")
        if self.closed:
            raise TierError("this store is closed", tier="memory")
        if changing and not self.arguments.writable:
            raise ValueError("this store was opened for reading only")

    def name(self, key: BlockKey) -> Name:
        return self.namespace, key

    def whole(self, name: Name) -> bool:
        return all(rank in self.shelf.blocks.get(name, {}) for rank in self.ranks)

    def used(self) -> int:
        parts = (part for block in self.shelf.blocks.values() for part in block.values())
        return sum(p.cost for p in parts) + sum(token.cost for token in self.open_tokens)

    # -------------------------------------------------------------------------------- storing

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        self.check(changing=True)
        with self.shelf.lock:
            new = [b for b in blocks if not self.has_part(self.name(b.key))]
            self.make_room(sum(b.checksum.length + OVERHEAD for b in new))
            places: list[Place | None] = []
            for block in blocks:
                token = Token(block.checksum.length + OVERHEAD)
                places.append(Place(block, token) if block in new else None)
                if block in new:
                    self.open_tokens.append(token)
            return places

    def has_part(self, name: Name) -> bool:
        return self.arguments.rank in self.shelf.blocks.get(name, {})

    def make_room(self, wanted: int) -> None:
        promised = sum(token.cost for token in self.open_tokens)
        if promised + wanted > self.arguments.capacity:
            raise NoSpace(f"{wanted} bytes do not fit")
        while self.used() + wanted > self.arguments.capacity:
            self.evict(next(iter(self.shelf.blocks)))

    def evict(self, name: Name) -> None:
        self.evicted += self.drop(name)

    def drop(self, name: Name) -> bool:
        was_whole = self.whole(name)
        del self.shelf.blocks[name]
        if was_whole:
            self.shelf.log.append((name, False))
        return was_whole

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        self.check(changing=True)
        if len(places) != len(memory):
            raise ValueError(f"{len(places)} places, {len(memory)} pieces of memory")
        for place, view in zip(places, memory, strict=True):
            if view.nbytes != place.block.checksum.length:
                raise ValueError(f"{view.nbytes} bytes for {place.block}")
        for place, view in zip(places, memory, strict=True):
            self.token(place).data = bytes(view)

    def token(self, place: Place) -> Token:
        assert isinstance(place.token, Token)
        return place.token

    def publish(self, places: Sequence[Place]) -> None:
        self.check(changing=True)
        with self.shelf.lock:
            tokens = [self.token(place) for place in places]
            if any(t.data is None or t not in self.open_tokens for t in tokens):
                raise ValueError("a place was not written, or is not reserved any more")
            for place, token in zip(places, tokens, strict=True):
                self.settle(token)
                assert token.data is not None
                self.add(self.name(place.block.key), Part(token.data, place.block.checksum))

    def add(self, name: Name, part: Part) -> None:
        before = self.whole(name)
        self.shelf.blocks.setdefault(name, {}).setdefault(self.arguments.rank, part)
        if self.whole(name) and not before:
            self.shelf.log.append((name, True))

    def settle(self, token: Token) -> None:
        self.open_tokens = [one for one in self.open_tokens if one is not token]

    def abandon(self, places: Sequence[Place]) -> None:
        for place in places:
            self.settle(self.token(place))

    # -------------------------------------------------------------------------------- reading

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        self.check()
        with self.shelf.lock:
            return [self.whole(self.name(key)) for key in keys]

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        self.check()
        if len(keys) != len(memory):
            raise ValueError(f"{len(keys)} keys, {len(memory)} pieces of memory")
        return [self.read_one(key, view) for key, view in zip(keys, memory, strict=True)]

    def read_one(self, key: BlockKey, view: memoryview) -> ReadResult:
        with self.shelf.lock:
            part = self.shelf.blocks.get(self.name(key), {}).get(self.arguments.rank)
        if part is None or len(part.data) > view.nbytes:
            return ReadResult(BlockStatus.MISSING)
        view[: len(part.data)] = part.data
        return ReadResult(BlockStatus.OK, part.checksum)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.check()
        with self.shelf.lock:
            for name in map(self.name, keys):
                if name in self.shelf.blocks:
                    self.shelf.blocks[name] = self.shelf.blocks.pop(name)

    # ------------------------------------------------------------------------------- removing

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        self.check(changing=True)
        with self.shelf.lock:
            return self.remove([b.key for b in blocks if self.carries(b)])

    def carries(self, block: NewBlock) -> bool:
        part = self.shelf.blocks.get(self.name(block.key), {}).get(self.arguments.rank)
        return part is not None and part.checksum == block.checksum

    def delete(self, keys: Sequence[BlockKey]) -> int:
        self.check(changing=True)
        with self.shelf.lock:
            return self.remove(keys)

    def remove(self, keys: Sequence[BlockKey]) -> int:
        names = dict.fromkeys(map(self.name, keys))
        there = [name for name in names if name in self.shelf.blocks]
        return sum(self.drop(name) for name in there)

    # ------------------------------------------------------------------------------ following

    def scan(self) -> Iterator[BlockKey]:
        self.check()
        with self.shelf.lock:
            names = [name for name in self.shelf.blocks if self.whole(name)]
        return iter([key for namespace, key in names if namespace == self.namespace])

    def changes(self, cursor: int | None) -> ChangeBatch:
        self.check()
        with self.shelf.lock:
            now = len(self.shelf.log)
            if cursor is None:
                return ChangeBatch(now, ())
            if not 0 <= cursor <= now:
                return ChangeBatch(now, (), restart=True)
            told = ((n[1], a) for n, a in self.shelf.log[cursor:] if n[0] == self.namespace)
            return ChangeBatch(now, tuple(told))

    def stat(self) -> StoreStat:
        self.check()
        with self.shelf.lock:
            blocks = len(list(self.scan()))
            capacity = self.arguments.capacity
            return StoreStat(blocks, self.used(), capacity, self.evicted, {"io": "memory"})

    def close(self) -> None:
        self.closed = True
        self.shelf.writers = [one for one in self.shelf.writers if one is not self]


class HonestMaintenance:
    def __init__(self, arguments: StoreArguments) -> None:
        self.arguments = arguments
        self.shelf = SHELVES.setdefault(arguments.path, Shelf())

    def namespaces(self) -> list[StoredNamespace]:
        with self.shelf.lock:
            return [self.told(of) for of in sorted(self.shelf.known)]

    def told(self, of: bytes) -> StoredNamespace:
        namespace, geometry = self.shelf.known[of]
        blocks = [parts for (mine, _), parts in self.shelf.blocks.items() if mine == of]
        whole = sum(len(parts) == geometry.world_size for parts in blocks)
        used = sum(len(part.data) for parts in blocks for part in parts.values())
        return StoredNamespace(namespace, geometry, whole, used, self.in_use(of))

    def in_use(self, of: bytes) -> bool:
        return any(store.namespace == of for store in self.shelf.writers)

    def reconcile(self, *, repair: bool) -> Reconciliation:
        if repair and not self.arguments.writable:
            raise ValueError("opened for looking only")
        return Reconciliation()

    def drop(self, namespace_id: bytes) -> int:
        with self.shelf.lock:
            if not self.arguments.writable or self.in_use(namespace_id):
                raise ValueError("opened for looking only, or in use")
            self.shelf.known.pop(namespace_id, None)
            names = [name for name in self.shelf.blocks if name[0] == namespace_id]
            for name in names:
                del self.shelf.blocks[name]
            return len(names)

    def close(self) -> None:
        pass


def memory_case(
    store: type[HonestStore] = HonestStore,
    maintenance: type[HonestMaintenance] = HonestMaintenance,
) -> StoreCase:
    """A store in the memory of one process."""
    return StoreCase(
        store,
        open_maintenance=maintenance,
        directory=False,
        plain_bytes=False,
        shared_between_processes=False,
        survives_kill=False,
    )
