"""What runs each kind of job, put together."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from tiered_kv.engine.behind import WriteBehind
from tiered_kv.engine.captures import SlotStorer
from tiered_kv.engine.hops import LiveHop
from tiered_kv.engine.jobs import Active, JobTable
from tiered_kv.engine.limits import EngineLimits
from tiered_kv.engine.loads import Loader
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.promotions import Promoter
from tiered_kv.engine.slotless import SlotlessStorer
from tiered_kv.engine.waiting import Staging
from tiered_kv.engine.wear import WriteMeter
from tiered_kv.memory import HostBlockPool
from tiered_kv.routing import Hop, Router
from tiered_kv.specs import LoadJob
from tiered_kv.stats import StatsRecorder

__all__ = ["Movers"]


class Movers:
    """Of one transfer engine: they share its loop, its hops and its staging."""

    def __init__(
        self,
        *,
        loop: LoopThread,
        jobs: JobTable,
        router: Router,
        hops: Mapping[Hop, LiveHop],
        memory: HostBlockPool,
        stats: StatsRecorder,
        limits: EngineLimits,
        meter: WriteMeter,
        tiers: int,
    ) -> None:
        """`tiers` is how many stores there are."""
        live, slot_bytes = hops.__getitem__, memory.slot_bytes
        staging = Staging(memory, tiers)
        self.behind = WriteBehind(
            loop=loop,
            jobs=jobs,
            router=router,
            live=live,
            memory=memory,
            stats=stats,
            limits=limits,
            meter=meter,
            tiers=tiers,
            staging_slots=staging.store_quota,
        )
        self.promoter = Promoter(
            loop=loop, jobs=jobs, router=router, live=live, limits=limits, slot_bytes=slot_bytes
        )
        self._loader = Loader(
            loop=loop,
            jobs=jobs,
            router=router,
            live=live,
            staging=staging,
            limits=limits,
            slot_bytes=slot_bytes,
        )
        self._slot_storer = SlotStorer(
            loop=loop,
            jobs=jobs,
            router=router,
            live=live,
            behind=self.behind,
            limits=limits,
            slot_bytes=slot_bytes,
        )
        self._slotless_storer = SlotlessStorer(
            loop=loop,
            jobs=jobs,
            router=router,
            live=live,
            staging=staging,
            behind=self.behind,
            stats=stats,
            limits=limits,
            meter=meter,
            slot_bytes=slot_bytes,
        )

    def run(self, active: Active) -> Coroutine[Any, Any, None]:
        """A load or a store of the engine, to its end; on the event loop's thread."""
        job = active.job
        if isinstance(job, LoadJob):
            return self._loader.run(active, job)
        if job.dst.first is None:
            return self._slotless_storer.run(active, job)
        return self._slot_storer.run(active, job, job.dst.first)
