"""Write-behind: blocks go from host slots to stores after the engine's job has ended.

Bounded in bytes, in seconds of writing, and in slots. What does not fit, or whose tier does not
work, is dropped and counted by reason; nothing ever waits for room here. The bounds of bytes and
slots are common, and each tier has a share of them, as many as have something to write: one that
is within its share takes the places of what was queued last for one that is not, so that a slow
tier holds nobody else's. What is dropped for one tier is still written to the others.

A write that failed is not repeated: the store may be ill, and the slot is wanted. The block is
stored again when it is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tiered_kv.engine.claims import Claims
from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.pace import Pace
from tiered_kv.engine.waiting import Patience, Priority
from tiered_kv.engine.wear import WriteMeter
from tiered_kv.memory import HostBlockPool
from tiered_kv.routing import CPU_ENDPOINT, Hop, Router, endpoint_of
from tiered_kv.specs import CpuSpec, HopResult, LoadStoreSpec, SlotRef, TransferSpec
from tiered_kv.stats import DropReason, StatsRecorder
from tiered_kv.values import BlockKey, BlockStatus

__all__ = ["BehindPart", "WriteBehind", "why_dropped"]

_WHY = {
    BlockStatus.NO_SPACE: DropReason.NO_SPACE,
    BlockStatus.OVER_BUDGET: DropReason.WEAR,
    BlockStatus.CANCELLED: DropReason.STALE,
}


def why_dropped(result: HopResult, *, poisoned: bool) -> Counter[DropReason]:
    """What of a write was not stored; `poisoned`: its job was given up."""
    found: Counter[DropReason] = Counter()
    for status in result.statuses:
        if status is not BlockStatus.OK:
            reason = _WHY.get(status, DropReason.FAILED)
            found[DropReason.POISONED if poisoned and reason is DropReason.STALE else reason] += 1
    return found


@dataclass(frozen=True, slots=True)
class BehindPart:
    """Blocks that lie whole in host slots and shall go to one store as well."""

    spec: LoadStoreSpec
    keys: tuple[BlockKey, ...]
    slots: tuple[SlotRef, ...]

    def take(self, indices: Sequence[int]) -> BehindPart:
        """Some of the blocks."""
        return BehindPart(
            self.spec.take(indices),
            tuple(self.keys[i] for i in indices),
            tuple(self.slots[i] for i in indices),
        )


@dataclass(slots=True, eq=False)
class _Hold:
    """What one job has left behind it."""

    free: Callable[[Iterable[SlotRef]], None]
    writes: int = 0
    """Blocks that wait or are being written, once per tier."""
    offering: bool = True
    """Its blocks are being taken in: none of its slots is freed before that is over."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One block for one tier."""

    active: Active
    part: BehindPart
    index: int
    size: int
    hold: _Hold

    @property
    def slot(self) -> SlotRef:
        return self.part.slots[self.index]


@dataclass(slots=True, eq=False)
class _Lane:
    """What one tier has to write."""

    hop: LiveHop
    pace: Pace
    most_bytes: int
    most_slots: int
    """What may be written at once: within the tier's share however many others there are, since it
    can't be taken back."""
    waiting: dict[SlotRef, _Entry] = field(default_factory=dict)
    """In the order in which they came."""
    blocks: int = 0
    size: int = 0
    """Bytes of what waits and of what is being written."""
    writing: int = 0
    """Blocks that are being written."""
    working: bool = False

    @property
    def tier(self) -> str:
        return self.hop.hop.tier

    def may_begin(self) -> bool:
        """Whether one more write fits beside those under way."""
        first = next(iter(self.waiting.values()), None)
        if first is None or not self.pace.under_way:
            return True
        return first.size <= self._room() and self.writing < self.most_slots

    def _room(self) -> int:
        return min(self.pace.room(), self.most_bytes - self.pace.under_way)

    def next_group(self, most: int) -> list[_Entry]:
        """Take what is written next together: blocks of one job, at most `most` bytes, and as many
        as the tier writes in time."""
        most = min(most, self._room())
        group: list[_Entry] = []
        size = 0
        for entry in self.waiting.values():
            size += entry.size
            fits = size <= most and self.writing + len(group) < self.most_slots
            if group and not (fits and entry.part is group[0].part):
                break
            group.append(entry)
        for entry in group:
            del self.waiting[entry.slot]
        return group


class WriteBehind:
    """Queues and workers of all tiers. Used on the event loop's thread only."""

    def __init__(
        self,
        *,
        loop: LoopThread,
        jobs: JobTable,
        router: Router,
        live: Callable[[Hop], LiveHop],
        memory: HostBlockPool,
        stats: StatsRecorder,
        limits: EngineLimits,
        meter: WriteMeter,
        tiers: int,
        staging_slots: int,
    ) -> None:
        """`tiers`: how many there are. `staging_slots`: how many stores may hold, where they have
        no slots of the manager."""
        self._loop = loop
        self._jobs = jobs
        self._router = router
        self._live = live
        self._memory = memory
        self._stats = stats
        self._limits = limits
        self._meter = meter
        share = limits.write_behind_share * memory.tier_slots
        self._slots = Claims(max(1, int(share)) if share > 0 else 0)
        self._staging = Claims(staging_slots)
        self._tiers = max(1, tiers)
        self._lanes: dict[str, _Lane] = {}
        self._paces: dict[str, Pace] = {}
        self._size = 0

    def pace(self, tier: str) -> Pace:
        """How fast a tier takes what is written to it."""
        return self._paces.setdefault(tier, Pace())

    def offer(
        self,
        active: Active,
        parts: Sequence[BehindPart],
        slots: Iterable[SlotRef],
        free: Callable[[Iterable[SlotRef]], None],
    ) -> frozenset[SlotRef]:
        """Take what there is room for; `free` is called once for each of `slots`: at once where
        nothing is written from it, else when its last write has ended.

        Returns:
            The slots from which something will be written, as far as tiers keep working.
        """
        hold = _Hold(free)
        self._jobs.behind(1)
        lanes: list[_Lane] = []
        for part in parts:
            lane = self._lane(part)
            if lane is None:
                self._stats.dropped(part.spec.tier, DropReason.UNHEALTHY, len(part.keys))
            else:
                lanes.append(lane)
                self._take_in(active, part, lane, hold)
        hold.offering = False
        kept = frozenset(slot for slot in slots if slot in self._claims(slot))
        free([slot for slot in slots if slot not in kept])
        if not hold.writes:
            self._jobs.behind(-1)
        for lane in lanes:
            self._count(lane)
            if lane.waiting and not lane.working:
                lane.working = True
                self._loop.spawn(self._work_off(lane))
        return kept

    def make_way(self, count: int, tiers: Iterable[str]) -> None:
        """Somebody wants so many staging slots, for blocks that go to these tiers: take them from
        what waits for tiers that have more than their share, if it is due."""
        wanted = tuple(tiers)
        while len(self._staging) + count > self._staging.limit:
            offers = map(self._staging.to_take_back, wanted)
            found = next((offer for offer in offers if offer is not None), None)
            if found is None:
                return
            self._take_back(*found)

    def drop_unusable(self) -> None:
        """Let go of what is queued for tiers that do not work."""
        for lane in self._lanes.values():
            if lane.waiting and lane.hop.trouble is not None:
                self._drop_waiting(lane, DropReason.UNHEALTHY)

    def drop_all(self) -> None:
        """Let go of everything that is queued: the engine closes."""
        for lane in self._lanes.values():
            self._drop_waiting(lane, DropReason.CLOSING)

    # -------------------------------------------------------------------------------- taking in

    def _lane(self, part: BehindPart) -> _Lane | None:
        """None where the tier does not work."""
        chain = self._router.find(CPU_ENDPOINT, endpoint_of(part.spec))
        if chain is None:
            return None
        hop = self._live(chain.hops[0])
        tier = hop.hop.tier
        if tier not in self._lanes:
            slots = self._slots.limit or self._staging.limit
            self._lanes[tier] = _Lane(
                hop,
                self.pace(tier),
                most_bytes=self._limits.store_queue_bytes // self._tiers,
                most_slots=max(1, slots // self._tiers),
            )
        return self._lanes[tier]

    def _take_in(self, active: Active, part: BehindPart, lane: _Lane, hold: _Hold) -> None:
        """Queue what there is room for, and count the rest."""
        dropped: Counter[DropReason] = Counter()
        for index, slot in enumerate(part.slots):
            if slot in lane.waiting:  # the job names the tier twice
                continue
            checksum = self._memory.checksum(slot)
            if checksum is None:
                dropped[DropReason.STALE] += 1
                continue
            size = checksum.length
            refused = self._refused(lane, slot, size)
            if refused is not None:
                dropped[refused] += 1
                continue
            lane.waiting[slot] = _Entry(active, part, index, size, hold)
            lane.blocks += 1
            lane.size += size
            self._size += size
            hold.writes += 1
            self._claims(slot).keep(slot, lane.tier)
        for reason, blocks in dropped.items():
            self._stats.dropped(lane.tier, reason, blocks)

    def _refused(self, lane: _Lane, slot: SlotRef, size: int) -> DropReason | None:
        speed = lane.pace.speed
        seconds = 0.0 if speed is None else (lane.size + size) / speed
        # What comes alone is written, so that the speed is known again when it has changed.
        if lane.size and seconds > self._limits.store_queue_seconds:
            return DropReason.QUEUE_TIME
        if not self._has_bytes(lane, size):
            return DropReason.QUEUE
        if not self._has_slot(lane, slot):
            return DropReason.SLOTS
        return None

    def _has_bytes(self, lane: _Lane, size: int) -> bool:
        """Whether so many bytes more may wait; takes them from tiers beyond their share."""
        limit = self._limits.store_queue_bytes
        if self._size + size <= limit:
            return True
        share = limit / sum(one is lane or one.size > 0 for one in self._lanes.values())
        if lane.size + size > share:
            return False
        while self._size + size > limit:
            over = [one for one in self._lanes.values() if one.waiting and one.size > share]
            if not over:
                return False
            behind = max(over, key=lambda one: one.size)
            _, newest = behind.waiting.popitem()
            self._drop(behind, [newest], DropReason.SHARE)
        return True

    def _has_slot(self, lane: _Lane, slot: SlotRef) -> bool:
        """Whether the slot may be kept; takes its place from tiers beyond their share."""
        claims = self._claims(slot)
        if claims is self._staging or slot in claims or not claims.full:
            return True  # staging has been leased, within a quota of its own
        found = claims.to_take_back(lane.tier)
        if found is None:
            return False
        self._take_back(*found)
        return True

    def _claims(self, slot: SlotRef) -> Claims:
        return self._slots if slot.number < self._memory.tier_slots else self._staging

    def _take_back(self, slot: SlotRef, tiers: Iterable[str]) -> None:
        for tier in tiers:
            lane = self._lanes[tier]
            self._drop(lane, [lane.waiting.pop(slot)], DropReason.SHARE)

    # ----------------------------------------------------------------------------------- writing

    async def _work_off(self, lane: _Lane) -> None:
        permits = lane.hop.permits
        while lane.waiting:
            while not lane.may_begin():
                await lane.pace.changed()
            await permits.take(Patience(), Priority.STORE)
            group = lane.next_group(self._limits.behind_bytes) if lane.may_begin() else []
            if not group:
                permits.give()
                continue
            for entry in group:
                self._claims(entry.slot).begin((entry.slot,))
            lane.writing += len(group)
            lane.pace.began(sum(entry.size for entry in group))
            self._loop.spawn(self._write(lane, group))
        lane.working = False

    async def _write(self, lane: _Lane, group: Sequence[_Entry]) -> None:
        """Write one group; the permit that was taken for it is given back."""
        hop, active = lane.hop, group[0].active
        size = sum(entry.size for entry in group)
        reason = self._hindrance(lane, active, size)
        if reason is not None:
            hop.permits.give()
            lane.pace.ended(size, 0)
            self._end_writing(lane, group)
            self._drop(lane, group, reason)
            return
        part = group[0].part.take([entry.index for entry in group])
        gate = Gate(active)
        spec = TransferSpec(CpuSpec(part.slots), part.spec, part.keys, gate.commit)
        limit = self._limits.store_deadline
        task = hop.begin(spec, limit)
        in_time = await Patience(self._loop.loop.time() + limit).wait(task)
        if not in_time:  # others may begin beside it, where the tier is tried again
            lane.pace.given_up(size)
        result = await task
        hop.permits.give()
        self._meter.written(lane.tier, result.copied_bytes)
        if in_time:
            lane.pace.ended(size, result.copied_bytes)
        self._end_writing(lane, group)
        for why, blocks in why_dropped(result, poisoned=active.void).items():
            self._stats.dropped(lane.tier, why, blocks)
        self._end(lane, group)

    def _hindrance(self, lane: _Lane, active: Active, size: int) -> DropReason | None:
        if active.void:
            return DropReason.POISONED
        if lane.hop.trouble is not None:
            return DropReason.UNHEALTHY
        return None if self._meter.allows(lane.tier, size) else DropReason.WEAR

    def _end_writing(self, lane: _Lane, group: Sequence[_Entry]) -> None:
        lane.writing -= len(group)
        for entry in group:
            self._claims(entry.slot).end((entry.slot,))

    # ------------------------------------------------------------------------------------ ending

    def _drop_waiting(self, lane: _Lane, reason: DropReason) -> None:
        entries = [*lane.waiting.values()]
        lane.waiting.clear()
        self._drop(lane, entries, reason)

    def _drop(self, lane: _Lane, entries: Sequence[_Entry], reason: DropReason) -> None:
        self._stats.dropped(lane.tier, reason, len(entries))
        self._end(lane, entries)

    def _end(self, lane: _Lane, entries: Sequence[_Entry]) -> None:
        """These blocks are over for the tier, well or not."""
        freed: dict[_Hold, list[SlotRef]] = {}
        for entry in entries:
            lane.blocks -= 1
            lane.size -= entry.size
            self._size -= entry.size
            entry.hold.writes -= 1
            of_hold = freed.setdefault(entry.hold, [])
            if self._claims(entry.slot).give_up(entry.slot, lane.tier):
                of_hold.append(entry.slot)
        self._count(lane)
        for hold, slots in freed.items():
            if hold.offering:
                continue
            if slots:
                hold.free(slots)
            if not hold.writes:
                self._jobs.behind(-1)

    def _count(self, lane: _Lane) -> None:
        self._stats.write_behind(lane.tier, blocks=lane.blocks, bytes_=lane.size)
