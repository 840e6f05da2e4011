"""One hop with its handler: calls that never raise, are counted, and are watched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from tiered_kv.contracts import (
    BlockStore,
    HostMemory,
    NewBlock,
    TransferHandler,
    Verification,
)
from tiered_kv.engine.health import HealthBoard
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.waiting import Permits
from tiered_kv.errors import DeadlineExceeded, Miss, NoSpace, TierError
from tiered_kv.routing import CPU_ENDPOINT, Hop
from tiered_kv.specs import CpuSpec, HopResult, TransferSpec
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockStatus

__all__ = ["Complaints", "LiveHop", "when_returned"]

logger = logging.getLogger(__name__)

COMPLAIN_AGAIN_SECONDS = 60.0

FAULTS = frozenset((BlockStatus.TIER_ERROR, BlockStatus.TIMED_OUT))
"""Answers that say something about the tier, not about the block or the job."""


class Complaints:
    """Logs each kind of trouble with its traceback once, then at most once a minute in a line.

    Used on the event loop's thread only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def about(self, where: str, error: BaseException) -> None:
        """Log an unexpected error of a handler."""
        kind = (where, type(error).__qualname__)
        now = self._clock()
        last, unsaid = self._seen.get(kind, (None, 0))
        if last is None:
            self._seen[kind] = (now, 0)
            logger.error(
                "%s failed unexpectedly; its blocks count as failed", where, exc_info=error
            )
        elif now - last >= COMPLAIN_AGAIN_SECONDS:
            self._seen[kind] = (now, 0)
            logger.error("%s failed again (%d times since): %r", where, unsaid + 1, error)
        else:
            self._seen[kind] = (last, unsaid + 1)


def when_returned(task: asyncio.Task[HopResult], then: Callable[[], object]) -> None:
    """Call `then` when a call has returned; never when its task was cancelled because the engine
    stops, since its threads may still be at work."""
    task.add_done_callback(lambda ended: None if ended.cancelled() else then())


@dataclass(slots=True)
class LiveHop:
    """A hop that may have a handler. Used on the event loop's thread, but for `attach`."""

    hop: Hop
    loop: LoopThread
    board: HealthBoard
    stats: StatsRecorder
    complaints: Complaints
    memory: HostMemory
    rank: int
    verification: Verification
    """The tier's."""
    executor: Executor
    """The tier's daemon threads for this direction."""
    permits: Permits
    """Shared by all hops that use the executor; the caller takes one before `begin` and gives it
    back when the task ends."""
    handler: TransferHandler[Any, Any] | None = None
    store: BlockStore | None = None
    modes: dict[str, str] | None = None
    running: int = 0
    _broken: asyncio.Future[None] | None = None

    def attach(self, handler: TransferHandler[Any, Any], store: BlockStore | None) -> None:
        """Make the hop usable; called once, from any thread."""
        self.store = store
        self.handler = handler
        self.modes = dict(handler.modes())
        if self.from_store:
            self.modes["verify"] = self.verification.mode.value
        self.board.open(self.hop)

    @property
    def trouble(self) -> str | None:
        """Why the hop is not to be used now; None where it may be."""
        return self.board.trouble(self.hop)

    @property
    def broken(self) -> asyncio.Future[None]:
        """Done as soon as the hop is not to be used any more; whoever waits for a turn on it goes
        another way then. A new one begins when the hop works again."""
        if self._broken is None or (self._broken.done() and self.trouble is None):
            self._broken = self.loop.loop.create_future()
        self.tell()
        return self._broken

    def tell(self) -> None:
        """Wake those that wait for a turn if the hop does not work (any more)."""
        waited_for = self._broken
        if waited_for is not None and not waited_for.done() and self.trouble is not None:
            waited_for.set_result(None)

    def begin(self, spec: TransferSpec[Any, Any], limit: float | None) -> asyncio.Task[HopResult]:
        """Start moving the blocks; the task never raises, and ends only when no copy can read or
        write their memory any more. After `limit` seconds the hop counts as unhealthy, but the
        task goes on.

        Blocks that came from a store into host slots are verified before the task ends.
        """
        call = _Call(self, spec)
        timer = None
        if limit is not None:
            timer = self.loop.loop.call_later(limit, call.late, limit)
        self.running += 1
        call.began = self.board.began(self.hop)
        task = self.loop.spawn(call.run())
        when_returned(task, lambda: self._end(timer))
        return task

    def _end(self, timer: asyncio.TimerHandle | None) -> None:
        self.running -= 1
        if timer is not None:
            timer.cancel()

    @property
    def from_store(self) -> bool:
        """Whether the hop loads from a store."""
        return self.store is not None and self.hop.src.tier == self.hop.tier

    @property
    def verifies(self) -> bool:
        """Whether the engine verifies what this hop brought."""
        return self.hop.dst == CPU_ENDPOINT and self.store is not None


class _Call:
    """One handler call."""

    def __init__(self, live: LiveHop, spec: TransferSpec[Any, Any]) -> None:
        self._live = live
        self._spec = spec
        self._is_late = False
        self.began = 0.0

    def late(self, limit: float) -> None:
        self._is_late = True
        self._live.board.late(self._live.hop, limit)

    async def run(self) -> HopResult:
        live = self._live
        result = await self._guarded()
        if live.verifies:
            result = await self._verified(result)
        if self._is_late:
            seconds = live.board.returned(live.hop, self.began)
        else:
            told = set(result.statuses) - {BlockStatus.CANCELLED}
            worked = bool(told) and not told & FAULTS
            seconds = live.board.ended(live.hop, self.began, result.copied_bytes, worked=worked)
        src, dst = live.hop.src.spec.medium, live.hop.dst.spec.medium
        live.stats.hop(src, dst, live.hop.tier, result, seconds)
        if live.from_store:
            live.stats.corrupt(live.hop.tier, "load", result.statuses.count(BlockStatus.CORRUPT))
        return result

    async def _guarded(self) -> HopResult:
        live = self._live
        label = live.hop.label
        try:
            if live.handler is None:
                raise TierError(f"{label} has no handler", tier=live.hop.tier)
            result = await live.handler.transfer(self._spec)
            _check_result(result, len(self._spec), label)
        except TierError as error:
            live.board.failed(live.hop, str(error))
            return self._all(BlockStatus.TIER_ERROR)
        except NoSpace as error:
            logger.debug("%s: %s", label, error)
            return self._all(BlockStatus.NO_SPACE)
        except DeadlineExceeded as error:
            live.board.failed(live.hop, str(error))
            return self._all(BlockStatus.TIMED_OUT)
        except Miss as error:
            logger.debug("%s: %s", label, error)
            return self._all(BlockStatus.MISSING)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the engine stops
            live.complaints.about(label, error)
            return self._all(BlockStatus.TIER_ERROR)
        # A handler may be anybody's, and serving must not notice what it raises.
        except Exception as error:  # noqa: BLE001
            live.complaints.about(label, error)
            return self._all(BlockStatus.TIER_ERROR)
        return result

    def _all(self, status: BlockStatus) -> HopResult:
        return HopResult((status,) * len(self._spec), 0)

    async def _verified(self, result: HopResult) -> HopResult:
        live = self._live
        if not any(status is BlockStatus.OK for status in result.statuses):
            return result
        destination = self._spec.dst
        if not isinstance(destination, CpuSpec):
            return self._all(BlockStatus.TIER_ERROR)
        try:
            statuses = await asyncio.get_running_loop().run_in_executor(
                live.executor, self._verify, destination, result.statuses
            )
        except RuntimeError as error:  # the executor was shut down: the engine closes
            live.complaints.about(live.hop.label, error)
            return self._all(BlockStatus.TIER_ERROR)
        return HopResult(statuses, result.copied_bytes)

    def _verify(
        self, destination: CpuSpec, statuses: Sequence[BlockStatus]
    ) -> tuple[BlockStatus, ...]:
        """Compare the bytes in the slots to their checksums, where that is due; runs in the tier's
        threads."""
        live = self._live
        verified = list(statuses)
        bound: dict[int, NewBlock] = {}
        for i, (key, slot) in enumerate(zip(self._spec.keys, destination.slots, strict=True)):
            if statuses[i] is not BlockStatus.OK:
                continue
            checksum = live.memory.checksum(slot)
            if checksum is None:
                verified[i] = BlockStatus.CANCELLED
            else:
                bound[i] = NewBlock(key, checksum)
        passed: list[NewBlock] = []
        corrupt: list[NewBlock] = []
        due = live.verification.due(list(bound.values()))
        for (i, block), is_due in zip(bound.items(), due, strict=True):
            view = live.memory.view(destination.slots[i])
            if view is None:
                verified[i] = BlockStatus.CANCELLED
            elif is_due and not block.checksum.verifies(block.key, live.rank, view):
                verified[i] = BlockStatus.CORRUPT
                corrupt.append(block)
            elif is_due:
                passed.append(block)
        live.verification.passed(passed)
        if corrupt and live.store is not None:
            _discard(live.store, corrupt, live.hop.tier)
        return tuple(verified)


def _check_result(result: object, count: int, label: str) -> None:
    if (
        not isinstance(result, HopResult)
        or len(result.statuses) != count
        or not all(isinstance(status, BlockStatus) for status in result.statuses)
        or result.copied_bytes < 0
    ):
        raise TypeError(
            f"the handler of {label} answered {result!r} for {count} blocks; expected a HopResult "
            "with one BlockStatus per block"
        )


def _discard(store: BlockStore, blocks: Sequence[NewBlock], tier: str) -> None:
    logger.warning(
        "tier %s: %d blocks do not match their checksums and are dropped: %s",
        tier,
        len(blocks),
        ", ".join(block.key.hex() for block in blocks[:3]),
    )
    try:
        store.discard(blocks)
    # A store may be anybody's; the blocks stay, and are found out again.
    except Exception as error:  # noqa: BLE001
        logger.warning("tier %s: they could not be dropped: %r", tier, error)
