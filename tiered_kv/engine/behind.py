"""Write-behind: blocks go from host slots to stores after the engine's job has ended.

Bounded in bytes and in slots. What does not fit, or whose tier does not work, is dropped and
counted; nothing ever waits for room here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.jobs import Active, Gate, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.waiting import Patience
from tiered_kv.errors import TierError
from tiered_kv.memory import HostBlockPool
from tiered_kv.routing import CPU_ENDPOINT, Hop, Router, endpoint_of
from tiered_kv.specs import CpuSpec, LoadStoreSpec, SlotRef, TransferSpec
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockKey

__all__ = ["BehindPart", "WriteBehind"]


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


class _Hold:
    """Slots that write-behind keeps from their owner, each until its last write has ended."""

    def __init__(self, free: Callable[[Iterable[SlotRef]], None]) -> None:
        self.free = free
        self.writes: Counter[SlotRef] = Counter()

    def end(self, slots: Iterable[SlotRef]) -> list[SlotRef]:
        """One write of each slot has ended; the slots that are free by that."""
        self.writes.subtract(slots)
        freed = [slot for slot in slots if not self.writes[slot]]
        for slot in freed:
            del self.writes[slot]
        return freed


@dataclass(frozen=True, slots=True)
class _Group:
    active: Active
    part: BehindPart
    hop: LiveHop
    hold: _Hold
    queued_bytes: int


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
    ) -> None:
        self._loop = loop
        self._jobs = jobs
        self._router = router
        self._live = live
        self._memory = memory
        self._stats = stats
        self._limits = limits
        share = limits.write_behind_share * memory.tier_slots
        self._slot_limit = max(1, int(share)) if share > 0 else 0
        self._held_slots = 0
        self._queued_bytes = 0
        self._queues: dict[Hop, deque[_Group]] = {}
        self._pumping: set[Hop] = set()
        self._waiting: Counter[str] = Counter()
        self._waiting_bytes: Counter[str] = Counter()

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
        groups: list[_Group] = []
        for part in parts:
            hop, reason = self._hop(part)
            if hop is None:
                self._dropped(part, reason, len(part.keys))
            else:
                groups.extend(self._accepted(active, part, hop, hold))
        kept = frozenset(hold.writes)
        free([slot for slot in slots if slot not in kept])
        if groups:
            self._jobs.behind(1)
        for group in groups:
            self._queues.setdefault(group.hop.hop, deque()).append(group)
            self._count(group, 1)
            self._pump(group.hop)
        return kept

    def drop_unusable(self) -> None:
        """Let go of what is queued for tiers that do not work."""
        for queue in self._queues.values():
            while queue and queue[0].hop.trouble is not None:
                self._drop(queue.popleft(), "unhealthy")

    def drop_all(self) -> None:
        """Let go of everything that is queued: the engine closes."""
        for queue in self._queues.values():
            while queue:
                self._drop(queue.popleft(), "closing")

    def _hop(self, part: BehindPart) -> tuple[LiveHop | None, str]:
        try:
            chain = self._router.chain(CPU_ENDPOINT, endpoint_of(part.spec))
        except TierError:
            return None, "unhealthy"
        return self._live(chain.hops[0]), ""

    def _accepted(
        self, active: Active, part: BehindPart, hop: LiveHop, hold: _Hold
    ) -> list[_Group]:
        """Cut what there is room for into groups, and count the rest."""
        taken: list[int] = []
        sizes: list[int] = []
        dropped: Counter[str] = Counter()
        for index, slot in enumerate(part.slots):
            checksum = self._memory.checksum(slot)
            if checksum is None:
                dropped["stale"] += 1
            elif self._queued_bytes + checksum.length > self._limits.store_queue_bytes:
                dropped["queue"] += 1
            elif slot not in hold.writes and not self._take_slot(slot):
                dropped["slots"] += 1
            else:
                hold.writes[slot] += 1
                self._queued_bytes += checksum.length
                taken.append(index)
                sizes.append(checksum.length)
        for reason, blocks in dropped.items():
            self._dropped(part, reason, blocks)
        groups: list[_Group] = []
        start = 0
        while start < len(taken):
            end, size = start + 1, sizes[start]
            while end < len(taken) and size + sizes[end] <= self._limits.behind_bytes:
                size += sizes[end]
                end += 1
            groups.append(_Group(active, part.take(taken[start:end]), hop, hold, size))
            start = end
        return groups

    def _take_slot(self, slot: SlotRef) -> bool:
        if slot.number >= self._memory.tier_slots:
            return True  # staging, which has a quota of its own
        if self._held_slots >= self._slot_limit:
            return False
        self._held_slots += 1
        return True

    def _pump(self, hop: LiveHop) -> None:
        """See to it that the hop's queue is worked off."""
        if hop.hop not in self._pumping:
            self._pumping.add(hop.hop)
            self._loop.spawn(self._work_off(hop))

    async def _work_off(self, hop: LiveHop) -> None:
        queue = self._queues[hop.hop]
        while queue:
            await hop.permits.take(Patience())
            if queue:
                self._loop.spawn(self._write(queue.popleft()))
            else:
                hop.permits.give()
        self._pumping.discard(hop.hop)

    async def _write(self, group: _Group) -> None:
        """Write one group; the permit that was taken for it is given back."""
        hop = group.hop
        if group.active.given_up or hop.trouble is not None:
            hop.permits.give()
            self._drop(group, "poisoned" if group.active.given_up else "unhealthy")
            return
        gate = Gate(group.active)
        part = group.part
        spec = TransferSpec(CpuSpec(part.slots), part.spec, part.keys, gate.commit)
        await hop.begin(spec, self._limits.store_deadline)
        hop.permits.give()
        self._end(group)

    def _drop(self, group: _Group, reason: str) -> None:
        self._dropped(group.part, reason, len(group.part.keys))
        self._end(group)

    def _end(self, group: _Group) -> None:
        self._queued_bytes -= group.queued_bytes
        self._count(group, -1)
        freed = group.hold.end(group.part.slots)
        self._held_slots -= sum(slot.number < self._memory.tier_slots for slot in freed)
        group.hold.free(freed)
        if not group.hold.writes:
            self._jobs.behind(-1)

    def _count(self, group: _Group, sign: int) -> None:
        tier = group.hop.hop.tier
        self._waiting[tier] += sign * len(group.part.keys)
        self._waiting_bytes[tier] += sign * group.queued_bytes
        self._stats.write_behind(tier, blocks=self._waiting[tier], bytes_=self._waiting_bytes[tier])

    def _dropped(self, part: BehindPart, reason: str, blocks: int) -> None:
        self._stats.dropped(part.spec.tier, reason, blocks)
