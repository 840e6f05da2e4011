"""The ends of a hop: ways to put blocks there, to make room, and to see what is there, all without
the handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np
import torch

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import BlockStore, NewBlock
from tiered_kv.memory import HostBlockPool, KVCaches
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, KeySpec, LoadStoreSpec, SlotRef
from tiered_kv.testing.conformance.blocks import aligned_copy, page_aligned
from tiered_kv.testing.conformance.handlers.caches import engine_pages
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, ChecksumKind

__all__ = ["Block", "CacheSide", "Fault", "Side", "SlotSide", "StoreSide"]

POISON = 0xA5
NEW_OWNER = 0xEE
"""What a slot is filled with by whoever it is given out to next."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is to be moved."""

    key: BlockKey
    group: int
    data: bytes

    def checksum(self, rank: int, kind: ChecksumKind = ChecksumKind.XXH3) -> BlockChecksum:
        """As it is bound at capture."""
        return BlockChecksum.capture(self.key, rank, memoryview(self.data), kind)


class Fault(Enum):
    """What is wrong with a block at its source, or with its place at the destination."""

    GONE = "gone"
    """Not stored any more; or its slot was given out anew."""
    FLIPPED = "one bit flipped"
    FLIPPED_FIRST = "the first bit flipped"
    FLIPPED_LAST = "the last bit flipped"
    OTHER_KEY = "bound under another key"
    OTHER_RANK = "bound by another rank"
    SHORT = "shorter than a block of its group"


class Side(Protocol):
    """One end of a hop."""

    def supply(
        self, blocks: Sequence[Block], faults: Mapping[int, Fault] | None = None
    ) -> LoadStoreSpec:
        """Put blocks there, as a hop before would have done; `faults` by position."""
        ...

    def offer(self, blocks: Sequence[Block], gone: Sequence[int] = ()) -> LoadStoreSpec:
        """Make room for blocks, filled with poison. The places at the positions `gone` are no
        longer the caller's."""
        ...

    def remember(self) -> object:
        """All that is there now, for `difference`."""
        ...

    def unchanged(self, before: object) -> bool:
        """Whether all that was there, and nothing else, is there now."""
        ...

    def difference(
        self, before: object, spec: LoadStoreSpec, blocks: Sequence[Block], arrived: Sequence[int]
    ) -> str | None:
        """What differs from: these positions arrived whole, and nothing else changed."""
        ...

    def arrived(self, spec: LoadStoreSpec, blocks: Sequence[Block]) -> list[int]:
        """Positions of the blocks that can be found there now, whatever their bytes."""
        ...


_FLIPPED = {
    Fault.FLIPPED_FIRST: (0.0, 1),
    Fault.FLIPPED: (0.5, 4),
    Fault.FLIPPED_LAST: (1.0, 128),
}
"""Where, as a part of the block, and which bits of that byte."""


def _bound(
    block: Block, fault: Fault | None, rank: int, kind: ChecksumKind
) -> tuple[bytes, BlockChecksum]:
    """The bytes that are put for a block, and the checksum that they are bound to."""
    data, checksum = block.data, block.checksum(rank, kind)
    if fault in _FLIPPED:
        place, mask = _FLIPPED[fault]
        place = int(place * (len(data) - 1))
        data = data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]
    elif fault is Fault.OTHER_KEY:
        checksum = replace(block, key=BlockKey(b"another key")).checksum(rank, kind)
    elif fault is Fault.OTHER_RANK:
        checksum = block.checksum(rank + 1, kind)
    elif fault is Fault.SHORT:
        data = data[:-1]
        checksum = replace(block, data=data).checksum(rank, kind)
    return data, checksum


class CacheSide:
    """The engine's KV caches."""

    def __init__(self, caches: KVCaches, geometry: CacheGeometry) -> None:
        self._caches = caches
        self._chunks = {group.index: group.chunk for group in geometry.groups}
        # Neighbours are not given to one block: ids go up in steps that visit them all.
        count = caches.num_blocks
        self._free = [i * 5 % count for i in range(count)]
        storages = {t.untyped_storage().data_ptr(): t for t in caches.tensors}
        self._whole = [
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
            for t in storages.values()
        ]
        for memory in self._whole:
            memory.fill_(POISON)

    def _take(self, block: Block) -> GpuBlock:
        chunk = self._chunks[block.group]
        ids, self._free = self._free[:chunk], self._free[chunk:]
        return GpuBlock(block.group, tuple(ids))

    def put(self, block: GpuBlock, data: bytes) -> None:
        """Write the pages that `block` names."""
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for page, begin, end in engine_pages(self._caches, block):
            page.copy_(source[begin:end])

    def held(self, block: GpuBlock) -> bytes:
        """The pages that `block` names, in order."""
        pages = [page.cpu().numpy() for page, _, _ in engine_pages(self._caches, block)]
        return np.concatenate(pages).tobytes()

    def supply(self, blocks: Sequence[Block], faults: Mapping[int, Fault] | None = None) -> GpuSpec:
        """See `Side`. What an engine holds has no faults that could be seen."""
        if faults:
            raise ValueError("the engine's blocks are right by definition")
        spec = GpuSpec(tuple(self._take(block) for block in blocks))
        for place, block in zip(spec.blocks, blocks, strict=True):
            self.put(place, block.data)
        return spec

    def offer(self, blocks: Sequence[Block], gone: Sequence[int] = ()) -> GpuSpec:
        """See `Side`. `gone` places lie outside the cache."""
        places = [self._take(block) for block in blocks]
        for i in gone:
            outside = (*places[i].block_ids[:-1], self._caches.num_blocks)
            places[i] = replace(places[i], block_ids=outside)
        return GpuSpec(tuple(places))

    def remember(self) -> list[torch.Tensor]:
        """See `Side`: all memory of the caches, padding included."""
        return [memory.clone() for memory in self._whole]

    def unchanged(self, before: object) -> bool:
        """See `Side`."""
        if not isinstance(before, list):
            raise TypeError("that was not remembered by a cache")
        return all(torch.equal(was, now) for was, now in zip(before, self._whole, strict=True))

    def difference(
        self, before: object, spec: LoadStoreSpec, blocks: Sequence[Block], arrived: Sequence[int]
    ) -> str | None:
        """See `Side`."""
        if not isinstance(spec, GpuSpec) or not isinstance(before, list):
            raise TypeError(f"{spec} is no place in the engine's cache")
        now = self.remember()
        self._restore(before)
        for i in arrived:
            self.put(spec.blocks[i], blocks[i].data)
        expected = self.remember()
        self._restore(now)
        for i in arrived:
            got = [page.clone() for page, _, _ in engine_pages(self._caches, spec.blocks[i])]
            self._restore(expected)
            due = [page.clone() for page, _, _ in engine_pages(self._caches, spec.blocks[i])]
            self._restore(now)
            if not all(torch.equal(a, b) for a, b in zip(got, due, strict=True)):
                return f"block {i} lies in the engine's cache with other bytes"
        for memory, due_bytes in zip(now, expected, strict=True):
            wrong = int((memory != due_bytes).sum())
            if wrong:
                return f"{wrong} bytes of the engine's cache changed that no block was to change"
        return None

    def _restore(self, memories: Sequence[torch.Tensor]) -> None:
        for memory, wanted in zip(self._whole, memories, strict=True):
            memory.copy_(wanted)

    def arrived(self, spec: LoadStoreSpec, blocks: Sequence[Block]) -> list[int]:
        """See `Side`."""
        if not isinstance(spec, GpuSpec):
            raise TypeError(f"{spec} is no place in the engine's cache")
        poison = bytes([POISON])
        return [i for i, place in enumerate(spec.blocks) if self.held(place).strip(poison)]


class SlotSide:
    """The rank's host block pool."""

    def __init__(self, pool: HostBlockPool, rank: int, kind: ChecksumKind) -> None:
        self._pool = pool
        self._rank = rank
        self._kind = kind
        self._next = 0

    def _fill(self, slot: SlotRef, data: bytes) -> None:
        view = self._pool.begin(slot)
        if view is None:
            raise RuntimeError(f"{slot} cannot be begun")
        view[: len(data)] = data

    def give_to_another(self, slot: SlotRef) -> None:
        """The slot's next owner begins, fills and binds it."""
        newer = SlotRef(slot.number, slot.generation + 1)
        foreign = bytes([NEW_OWNER]) * self._pool.slot_bytes
        self._fill(newer, foreign)
        theirs = BlockChecksum.capture(BlockKey(b"new owner"), self._rank, memoryview(foreign))
        if not self._pool.bind(newer, theirs):
            raise RuntimeError(f"{newer} cannot be bound")

    def supply(self, blocks: Sequence[Block], faults: Mapping[int, Fault] | None = None) -> CpuSpec:
        """See `Side`."""
        slots: list[SlotRef] = []
        for i, block in enumerate(blocks):
            fault = (faults or {}).get(i)
            slot = SlotRef(self._next, 1)
            self._next += 1
            data, checksum = _bound(block, fault, self._rank, self._kind)
            self._fill(slot, data)
            self._pool.bind(slot, checksum)
            if fault is Fault.GONE:
                self.give_to_another(slot)
            slots.append(slot)
        return CpuSpec(tuple(slots))

    def offer(self, blocks: Sequence[Block], gone: Sequence[int] = ()) -> CpuSpec:
        """See `Side`."""
        slots: list[SlotRef] = []
        for i in range(len(blocks)):
            self._fill(SlotRef(self._next, 1), bytes([POISON]) * self._pool.slot_bytes)
            slots.append(SlotRef(self._next, 2))
            self._next += 1
            if i in gone:
                self.give_to_another(slots[-1])
        return CpuSpec(tuple(slots))

    def remember(self) -> list[bytes]:
        """See `Side`: the bytes of all slots."""
        return [self._pool.as_array(i).tobytes() for i in range(self._next)]

    def unchanged(self, before: object) -> bool:
        """See `Side`."""
        return before == self.remember()

    def difference(
        self, before: object, spec: LoadStoreSpec, blocks: Sequence[Block], arrived: Sequence[int]
    ) -> str | None:
        """See `Side`. A slot that was leased to the call, and did not arrive, may hold anything,
        but is not bound."""
        if not isinstance(spec, CpuSpec) or not isinstance(before, list):
            raise TypeError(f"{spec} is no place in the host block pool")
        mine = {slot.number for slot in spec.slots}
        for number, was in enumerate(before):
            slot = SlotRef(number, 3)
            foreign = self._pool.checksum(slot) is not None
            if (number not in mine or foreign) and self._pool.as_array(number).tobytes() != was:
                return f"slot {number} was written, which was not leased to the call any more"
        for i, slot in enumerate(spec.slots):
            checksum, view = self._pool.checksum(slot), self._pool.view(slot)
            if i not in arrived:
                if checksum is not None:
                    return f"slot {slot} is bound to block {i}, which is not OK"
            elif checksum is None or view is None:
                return f"slot {slot} is not bound to block {i}"
            elif bytes(view) != blocks[i].data:
                return f"slot {slot} holds other bytes than block {i}"
            elif not checksum.verifies(blocks[i].key, self._rank, view):
                return f"slot {slot} is bound to {checksum}, which block {i} does not have"
        return None

    def arrived(self, spec: LoadStoreSpec, blocks: Sequence[Block]) -> list[int]:
        """See `Side`."""
        if not isinstance(spec, CpuSpec):
            raise TypeError(f"{spec} is no place in the host block pool")
        return [i for i, s in enumerate(spec.slots) if self._pool.checksum(s) is not None]

    def checksum(self, spec: LoadStoreSpec, i: int) -> BlockChecksum | None:
        """What block `i` is bound to."""
        if not isinstance(spec, CpuSpec):
            raise TypeError(f"{spec} is no place in the host block pool")
        return self._pool.checksum(spec.slots[i])

    def data(self, spec: LoadStoreSpec, i: int) -> bytes | None:
        """The bytes that are bound as block `i`."""
        if not isinstance(spec, CpuSpec):
            raise TypeError(f"{spec} is no place in the host block pool")
        view = self._pool.view(spec.slots[i])
        return None if view is None else bytes(view)


class StoreSide:
    """A key-addressed store, seen from this rank; `peer` is the store of the other rank, whose
    parts make blocks whole."""

    def __init__(
        self,
        spec: type[KeySpec],
        tier: str,
        store: BlockStore,
        peer: BlockStore,
        rank: int,
        kind: ChecksumKind,
    ) -> None:
        self._spec = spec
        self._tier = tier
        self._store = store
        self._peer = peer
        self._rank = rank
        self._kind = kind

    def _put(self, store: BlockStore, key: BlockKey, data: bytes, checksum: BlockChecksum) -> None:
        (place,) = store.reserve([NewBlock(key, checksum)])
        if place is not None:
            store.write([place], [aligned_copy(data)])
            store.publish([place])

    def _put_peer(self, block: Block) -> None:
        self._put(self._peer, block.key, block.data, block.checksum(1 - self._rank, self._kind))

    def supply(self, blocks: Sequence[Block], faults: Mapping[int, Fault] | None = None) -> KeySpec:
        """See `Side`."""
        for i, block in enumerate(blocks):
            fault = (faults or {}).get(i)
            if fault is Fault.GONE:
                continue
            self._put_peer(block)
            self._put(self._store, block.key, *_bound(block, fault, self._rank, self._kind))
        return self._spec(self._tier, tuple(block.key for block in blocks))

    def offer(self, blocks: Sequence[Block], gone: Sequence[int] = ()) -> KeySpec:
        """See `Side`. The other rank's parts are there already."""
        if gone:
            raise ValueError("a store has no places that could be given out anew")
        for block in blocks:
            self._put_peer(block)
        return self._spec(self._tier, tuple(block.key for block in blocks))

    def remember(self) -> set[BlockKey]:
        """See `Side`: the visible keys."""
        return set(self._store.scan())

    def unchanged(self, before: object) -> bool:
        """See `Side`."""
        return before == self.remember()

    def difference(
        self, before: object, spec: LoadStoreSpec, blocks: Sequence[Block], arrived: Sequence[int]
    ) -> str | None:
        """See `Side`."""
        if not isinstance(before, set):
            raise TypeError("that was not remembered by a store")
        now = self.remember()
        expected = before | {blocks[i].key for i in arrived}
        if now != expected:
            return (
                f"{len(now - expected)} keys are visible that did not arrive, and "
                f"{len(expected - now)} that did are not"
            )
        for i in arrived:
            memory = page_aligned(len(blocks[i].data))
            (result,) = self._store.read([blocks[i].key], [memory])
            if result.status is not BlockStatus.OK or result.checksum is None:
                return f"block {i} is read from the store as {result.status}"
            if bytes(memory) != blocks[i].data:
                return f"block {i} lies in the store with other bytes"
            if not result.checksum.verifies(blocks[i].key, self._rank, memory):
                return f"the row of block {i} says {result.checksum}, which it does not have"
        return None

    def arrived(self, spec: LoadStoreSpec, blocks: Sequence[Block]) -> list[int]:
        """See `Side`."""
        seen = self._store.contains([block.key for block in blocks])
        return [i for i, there in enumerate(seen) if there]

    def row(self, block: Block) -> BlockChecksum | None:
        """What the block's row says."""
        (result,) = self._store.read([block.key], [page_aligned(len(block.data))])
        return result.checksum
