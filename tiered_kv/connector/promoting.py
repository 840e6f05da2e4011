"""Promotions: blocks of slow tiers are brought into host slots ahead of the load that needs them,
so that the load holds the engine's blocks for one quick copy alone.

A tier is *far* for a hit where loading the hit's blocks from it would take `NEAR_SECONDS` or more.
A request with a far hit waits (RETRY) until its blocks have come, for a bounded time; then what
has come is a hit of the host tier, and the rest is a miss. However many requests want a block, it
is read once, and it is kept until the first load that uses it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tiered_kv.connector.books import Books
from tiered_kv.connector.requests import Answer, RequestState
from tiered_kv.placement import HostCatalog, SlotState
from tiered_kv.specs import CpuSpec, Part, Parts, PromoteJob, SlotRef
from tiered_kv.values import BlockKey, BlockStatus, CacheGeometry, JobId

__all__ = ["Promotions"]

NEAR_SECONDS = 0.1
"""A load that takes less may as well hold the engine's blocks meanwhile."""

KEEP_SECONDS = 10.0
"""How long a block that was brought is kept for its first load: longer than a request waits to be
scheduled again, and as long as a lookup's answer protects blocks. A block whose requests are all
gone takes no other's place for ever."""

PROMOTION_SHARE = 0.5
"""Of the host slots, what promotions may hold: blocks on their way, and those that no load has used
yet. The other half stays for what the engine itself stores and finds again."""

HEADROOM_SHARE = 0.25
"""Of the host slots, what stores may not hold while they are copied or written behind, so that a
promotion always finds slots that can be taken. Only where a tier is slow enough to be promoted
from: else nobody would use it."""

JOB_SECONDS = 0.1
"""About how long the reading of one job takes, so that what comes is heard of soon ..."""

JOB_BYTES = 4 * 2**20
"""... and the most bytes of one, per rank: reads do not get faster beyond it."""


def _unknown(tokens: int) -> float | None:
    return None


@dataclass(slots=True)
class _Running:
    """A promotion that has not ended on all ranks."""

    tier: str
    slots: dict[BlockKey, SlotRef]
    """Of the blocks that have failed on no rank so far."""
    keys: tuple[BlockKey, ...]
    ranks: set[int]
    """That have not reported it."""


class Promotions:
    """Decides what is promoted, and what lookups answer meanwhile. Scheduler's thread only.

    Nothing queues here: a request whose blocks find no slots asks again at its next lookup, until
    its wait is over. What is ordered is bounded by `PROMOTION_SHARE`.
    """

    def __init__(
        self, books: Books, recompute_seconds: Callable[[int], float | None] = _unknown
    ) -> None:
        """`recompute_seconds` predicts how long the engine computes so many tokens; None: not
        known, and `limits.lookup_wait_far` alone bounds a wait."""
        self._books = books
        self._recompute_seconds = recompute_seconds
        self._ids = itertools.count()
        self._orders: list[PromoteJob] = []
        self._running: dict[JobId, _Running] = {}
        self._coming: dict[BlockKey, JobId] = {}
        """Blocks on their way that no rank has failed to bring."""
        self._ahead: Counter[str] = Counter()
        """The same, as numbers by tier."""
        self._kept: dict[BlockKey, tuple[JobId, float]] = {}
        """Blocks that came and that no load has used: the promotion that protects them, and until
        when; oldest first."""
        self._news = 0
        """Grows whenever a block that requests wait for has come, or failed."""

    # ------------------------------------------------------------------------------- lookups

    def nothing_new(self, state: RequestState, now: float) -> bool:
        """Whether a request waits for blocks on their way alone, and has nothing to hear yet."""
        return state.news == self._news and state.far_until is not None and now < state.far_until

    def answer(self, state: RequestState, keys: Sequence[BlockKey], now: float) -> None:
        """Change a lookup's answers where blocks are in far tiers, or on their way from one, and
        have them brought. What the request finds in the host tier is leased to it already."""
        books = self._books
        catalog, host, geometry = books.catalog, books.host_tier, books.geometry
        state.news = -1
        if catalog is None or geometry is None or not books.allows(state, host):
            return
        if not self._coming and not self._any_far(len(keys), geometry):
            return
        useful = self._useful(state, keys, geometry)
        far = self._far(state, useful, catalog, geometry)
        coming = [key for key in useful if key in self._coming]
        if not far and not coming:
            return
        if state.far_until is None:
            slow = {*coming, *(key for found in far.values() for key in found)}
            first = next(i for i, key in enumerate(useful) if key in slow)
            state.far_until = now + self._wait(len(useful) - first, geometry)
        self._expire(now)
        left = state.far_until - now
        changed: dict[BlockKey, Answer] = {}
        for tier, found in far.items():
            if left <= 0:
                self._count(state, tier, "late", len(found))
                changed.update(dict.fromkeys(found, Answer.MISS))
                continue
            rest = [key for key in found if key not in self._coming]
            reason = self._order(tier, rest, left, state.parents, catalog, geometry)
            if reason is not None:
                self._count(state, tier, reason, len(rest))
            if reason != "large":
                answer = Answer.RETRY if reason is None else Answer.MISS
                changed.update(dict.fromkeys(rest, answer))
        if left > 0:
            changed.update(dict.fromkeys(coming, Answer.RETRY))
        for key, answer in changed.items():
            state.answers[key] = answer
            state.sources.pop(key, None)
        if Answer.RETRY in changed.values():
            state.settled = False
        open_keys = (
            key for key, answer in state.answers.items() if answer in (Answer.PENDING, Answer.RETRY)
        )
        if all(key in self._coming for key in open_keys):
            state.news = self._news

    def _useful(
        self, state: RequestState, keys: Sequence[BlockKey], geometry: CacheGeometry
    ) -> Sequence[BlockKey]:
        """Blocks that the engine may load: not those that it has itself, nor any behind a miss.

        With several KV groups all of them: which group a block belongs to is the engine's affair,
        and a window needs no beginning."""
        group, *others = geometry.groups
        if others:
            return keys
        start = max(0, state.computed) // group.tokens
        return list(
            itertools.takewhile(
                lambda key: state.answers[key] is not Answer.MISS or key in self._coming,
                keys[start:],
            )
        )

    def _far(
        self,
        state: RequestState,
        keys: Sequence[BlockKey],
        catalog: HostCatalog,
        geometry: CacheGeometry,
    ) -> dict[str, list[BlockKey]]:
        """Blocks found in tiers that are far for this hit. Those that lie in the host tier, which
        is not asked for them now, need no promotion."""
        found: dict[str, list[BlockKey]] = {}
        for key in keys:
            tier = state.sources.get(key)
            if tier is not None and catalog.lookup(key) is not SlotState.READY:
                found.setdefault(tier, []).append(key)
        return {
            tier: blocks
            for tier, blocks in found.items()
            if self._load_seconds(tier, len(blocks), geometry) >= NEAR_SECONDS
        }

    def _any_far(self, blocks: int, geometry: CacheGeometry) -> bool:
        """Whether any tier is far for so many blocks."""
        return any(
            self._load_seconds(tier.name, blocks, geometry) >= NEAR_SECONDS
            for tier in self._books.tiers
        )

    def _load_seconds(self, tier: str, blocks: int, geometry: CacheGeometry) -> float:
        """Predicted; 0 where nothing is known of the tier."""
        rate = self._books.conditions.load_rate(tier)
        return 0.0 if rate is None else rate.seconds(blocks * geometry.slot_bytes)

    def _wait(self, blocks: int, geometry: CacheGeometry) -> float:
        """How long a request waits for so many blocks: not longer than computing them takes."""
        tokens = blocks * min(group.tokens for group in geometry.groups) // len(geometry.groups)
        limit = self._books.limits.lookup_wait_far
        recompute = self._recompute_seconds(tokens)
        return limit if recompute is None else min(limit, recompute)

    def _count(self, state: RequestState, tier: str, reason: str, blocks: int) -> None:
        """Once per request, tier and reason."""
        if (tier, reason) not in state.unpromoted:
            state.unpromoted.add((tier, reason))
            self._books.stats.unpromoted(tier, reason, blocks)

    # -------------------------------------------------------------------------------- orders

    def _order(
        self,
        tier: str,
        keys: Sequence[BlockKey],
        seconds: float,
        parents: Mapping[BlockKey, BlockKey | None],
        catalog: HostCatalog,
        geometry: CacheGeometry,
    ) -> str | None:
        """Have blocks brought within `seconds`, all or none; why they will not be, else None: they
        are on their way, or wait for slots."""
        if not keys:
            return None
        most = _share(catalog.slots, PROMOTION_SHARE)
        if len(keys) > most:
            return "large"
        if self._load_seconds(tier, self._ahead[tier] + len(keys), geometry) > seconds:
            return "slow"
        room = most - catalog.unreleased(promotion=True) - len(self._kept)
        if len(keys) > room:
            return None
        given = catalog.allocate(keys, self._books.world, promotion=True, parents=parents)
        if self._books.host_tier is not None:
            self._books.stats.evicted(self._books.host_tier, len(given.evicted))
        size = self._job_blocks(tier, geometry)
        chosen = list(given.slots)
        for start in range(0, len(chosen), size):
            self._add(
                tier, {key: given.slots[key] for key in chosen[start : start + size]}, seconds
            )
        return None

    def _job_blocks(self, tier: str, geometry: CacheGeometry) -> int:
        rate = self._books.conditions.load_rate(tier)
        size = JOB_BYTES if rate is None else min(JOB_BYTES, rate.bytes_per_second * JOB_SECONDS)
        return max(1, int(size) // geometry.slot_bytes)

    def _add(self, tier: str, slots: dict[BlockKey, SlotRef], seconds: float) -> None:
        view = next(view for view in self._books.tiers if view.name == tier)
        keys = tuple(slots)
        job = PromoteJob(
            JobId(next(self._ids)),
            keys,
            Parts((Part(view.spec(tier, keys), tuple(range(len(keys)))),)),
            CpuSpec(tuple(slots.values())),
            seconds,
        )
        self._orders.append(job)
        self._running[job.id] = _Running(tier, slots, keys, set(range(self._books.world)))
        self._coming.update(dict.fromkeys(keys, job.id))
        self._ahead[tier] += len(keys)

    def take_orders(self) -> tuple[PromoteJob, ...]:
        """What the ranks are to read, since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def store_room(self) -> int | None:
        """How many slots more stores may hold now; None: as many as there are."""
        books = self._books
        catalog, geometry = books.catalog, books.geometry
        if catalog is None or geometry is None:
            return None
        if not self._any_far(_share(catalog.slots, PROMOTION_SHARE), geometry):
            return None
        headroom = _share(catalog.slots, HEADROOM_SHARE)
        return max(0, catalog.slots - headroom - catalog.unreleased(promotion=False))

    # ---------------------------------------------------------------------------------- ends

    def take(self, ended: Iterable[tuple[int, JobId, tuple[BlockStatus, ...]]]) -> None:
        """Promotions have ended on ranks. A block that came on all of them can be found and is
        kept; one that did not come on one is forgotten, and its tier is not asked for it for a
        while. What ended before is ignored. May be called again where it has raised."""
        for rank, number, statuses in ended:
            job = self._running.get(number)
            if job is None or rank not in job.ranks:
                continue
            for key, status in zip(job.keys, statuses, strict=True):
                if status is not BlockStatus.OK and key in job.slots:
                    self._fail(job, key, status)
            if job.ranks == {rank}:
                self._succeed(number, job)
                del self._running[number]
            job.ranks.discard(rank)

    def _fail(self, job: _Running, key: BlockKey, status: BlockStatus) -> None:
        books = self._books
        if books.catalog is not None:
            books.catalog.store_failed([job.slots[key]])
        del job.slots[key]
        if status.lost:
            books.forget(job.tier, key)
        books.backoff.add(job.tier, key, books.clock() + books.limits.retry_backoff)
        books.stats.unpromoted(job.tier, status.value, 1)
        self._arrived(job.tier, [key])

    def _succeed(self, number: JobId, job: _Running) -> None:
        books = self._books
        keys = list(job.slots)
        if not keys or books.catalog is None or books.host_tier is None:
            return
        until = books.clock() + KEEP_SECONDS
        books.catalog.stored(list(job.slots.values()))
        books.catalog.lease(keys, number, until)
        books.backoff.drop(books.host_tier, keys)
        books.stats.promoted(job.tier, len(keys))
        self._kept.update((key, (number, until)) for key in keys)
        self._arrived(job.tier, keys)

    def _arrived(self, tier: str, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if self._coming.pop(key, None) is not None:
                self._ahead[tier] -= 1
        self._news += 1

    def used(self, keys: Iterable[BlockKey]) -> None:
        """A load pins these blocks: what was kept for it can be evicted when it is over."""
        for key in keys:
            kept = self._kept.pop(key, None)
            if kept is not None and self._books.catalog is not None:
                self._books.catalog.end_lease(kept[0], [key])

    def _expire(self, now: float) -> None:
        while self._kept:
            key, (_, until) = next(iter(self._kept.items()))
            if until > now:
                return
            del self._kept[key]  # the catalog's lease ends by itself

    # ------------------------------------------------------------------------------- the end

    def reset(self) -> None:
        """Forget every block. Slots of promotions that run stay out of use until the ranks have
        released them; what no rank was told of is released here."""
        catalog = self._books.catalog
        if catalog is not None:
            for job in self._orders:
                for slot in job.dst.slots:
                    for rank in range(self._books.world):
                        catalog.release(slot, rank)
            for number, _ in self._kept.values():
                catalog.end_lease(number)
        self._orders.clear()
        self._running.clear()
        self._coming.clear()
        self._ahead.clear()
        self._kept.clear()
        self._news += 1

    @property
    def kept(self) -> int:
        """Blocks that are protected until their first load, at most for `KEEP_SECONDS`."""
        self._expire(self._books.clock())
        return len(self._kept)

    def audit(self) -> tuple[str, ...]:
        """What is still on its way once all promotions have ended; empty in a sound program."""
        if not self._running and not self._coming:
            return ()
        return (f"{len(self._running)} promotions run, of {len(self._coming)} blocks",)


def _share(slots: int, share: float) -> int:
    """Of at least two slots, at least one."""
    return max(1, int(slots * share)) if slots > 1 else 0
