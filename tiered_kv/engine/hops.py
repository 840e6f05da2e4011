"""One hop with its handler: calls that never raise, are counted, and are watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from tiered_kv.complaints import Complaints
from tiered_kv.contracts import BlockStore, HostMemory, NewBlock, Verification, no_room
from tiered_kv.engine.attached import Attached
from tiered_kv.engine.health import HealthBoard, Verdict, Watched
from tiered_kv.engine.loop import LoopThread
from tiered_kv.engine.recent import RecentKeys
from tiered_kv.engine.waiting import Permits, RightOfWay
from tiered_kv.errors import DeadlineExceeded, Miss, NoSpace, TierError, TierGone
from tiered_kv.routing import CPU_ENDPOINT, Hop
from tiered_kv.specs import CpuSpec, HopResult, TransferSpec
from tiered_kv.stats import StatsRecorder
from tiered_kv.values import BlockStatus

__all__ = ["LiveHop", "drop_corrupt", "when_returned"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

FAULTS = frozenset((BlockStatus.TIER_ERROR, BlockStatus.TIMED_OUT))
"""Answers that say something about the tier, not about the block or the job."""


COUNTS_AS_FAILED = "its blocks count as failed"


def when_returned(task: asyncio.Task[Any], then: Callable[[], object]) -> None:
    """Call `then` when a call has returned; never when its task was cancelled because the engine
    stops, since its threads may still be at work."""
    task.add_done_callback(lambda ended: None if ended.cancelled() else then())


@dataclass(slots=True)
class LiveHop:
    """A hop that may have a handler. Used on the event loop's thread, but for `attached`."""

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
    way: RightOfWay
    """Shared by all hops of the tier: a load holds it from when it begins to wait until it ends,
    or is given up."""
    recent: RecentKeys | None = None
    """Blocks that are known to lie in the tier."""
    gone: Callable[[str, BlockStore, str], None] | None = None
    """Told of a tier and its store whose medium is gone, and why."""
    patience: float = 0.0
    """Seconds that a call may run before it counts as hanging, even where its caller waits for
    less."""
    attached: Attached | None = None
    """What serves it now; replaced from any thread. A call ends on what it began with."""
    running: int = 0
    """Calls that run, but for probes."""
    _broken: asyncio.Future[None] | None = None

    @property
    def modes(self) -> dict[str, str] | None:
        """What is in effect, as its handler says; None without one."""
        attached = self.attached
        if attached is None:
            return None
        verify = {"verify": self.verification.mode.value} if self.loads(attached.store) else {}
        return attached.modes | verify

    def loads(self, store: BlockStore | None) -> bool:
        """Whether the hop loads from this store."""
        return store is not None and self.hop.src.tier == self.hop.tier

    def enter(self) -> Attached | None:
        """What serves a call that begins now."""
        while (attached := self.attached) is not None:
            if attached.begin():
                return attached
        return None

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

    def begin(
        self, spec: TransferSpec[Any, Any], limit: float | None, *, probe: bool = False
    ) -> asyncio.Task[HopResult]:
        """Start moving the blocks; the task never raises, and ends only when no copy can read or
        write their memory any more. After `limit` seconds, and not less than `patience`, the call
        counts as hanging, but the task goes on. A `probe` takes no permit, and is none of the
        engine's loads.

        Blocks that came from a store into host slots are verified before the task ends.
        """
        attached = self.enter()
        call = _Call(self, attached, spec, self.board.began(self.hop, probe=probe))
        if not probe:
            self.running += 1
        task = self.loop.spawn(call.run())
        self._watch(task, call.watched, attached, limit)
        return task

    def ask(
        self, question: Callable[[BlockStore], T], limit: float, *, decides: bool
    ) -> asyncio.Task[T | None]:
        """Ask the tier's store something that blocks, as a probe; the task gives None where it
        could not answer, and never raises. Whether an answer shows that the tier works, `decides`
        says."""
        attached = self.enter()
        watched = self.board.began(self.hop, probe=True)
        task = self.loop.spawn(self._asked(attached, question, watched, decides))
        self._watch(task, watched, attached, limit)
        return task

    async def _asked(
        self,
        attached: Attached | None,
        question: Callable[[BlockStore], T],
        watched: Watched,
        decides: bool,
    ) -> T | None:
        verdict, answer, reason = Verdict.NOTHING, None, ""
        if attached is not None and attached.store is not None:
            try:
                answer = await asyncio.get_running_loop().run_in_executor(
                    self.executor, question, attached.store
                )
                verdict = Verdict.WORKED if decides else Verdict.NOTHING
            except TierGone as error:
                self.tell_gone(attached, error)
            # A store may be anybody's; whatever it raises, it does not work.
            except Exception as error:  # noqa: BLE001
                verdict, reason = Verdict.FAILED, str(error)
        self.board.ended(watched, verdict, reason=reason)
        return answer

    def tell_gone(self, attached: Attached, error: TierGone) -> None:
        """What the store that a call began with was opened on is not there any more."""
        if self.attached is not attached:  # the tier has another one by now, or none
            return
        self.board.gone(self.hop.tier, str(error))
        if self.gone is not None and attached.store is not None:
            self.gone(self.hop.tier, attached.store, str(error))

    def _watch(
        self,
        task: asyncio.Task[T],
        watched: Watched,
        attached: Attached | None,
        limit: float | None,
    ) -> None:
        timer = None
        if limit is not None:
            seconds = max(limit, self.patience)
            timer = self.loop.loop.call_later(seconds, self.board.late, watched, seconds)

        def ended() -> None:
            if not watched.probe:
                self.running -= 1
            if timer is not None:
                timer.cancel()
            if attached is not None:
                attached.end()

        when_returned(task, ended)


class _Call:
    """One handler call."""

    def __init__(
        self,
        live: LiveHop,
        attached: Attached | None,
        spec: TransferSpec[Any, Any],
        watched: Watched,
    ) -> None:
        self.watched = watched
        self._live = live
        self._attached = attached
        self._store = None if attached is None else attached.store
        self._spec = spec
        self._problem = ""

    async def run(self) -> HopResult:
        live = self._live
        result = await self._guarded()
        seconds = live.board.ended(
            self.watched, self._verdict(result), result.copied_bytes, self._problem
        )
        src, dst = live.hop.src.spec.medium, live.hop.dst.spec.medium
        if not self.watched.probe:
            live.stats.hop(src, dst, live.hop.tier, result, seconds)
        if live.loads(self._store):
            found = "probe" if self.watched.probe else "load"
            live.stats.corrupt(live.hop.tier, found, result.statuses.count(BlockStatus.CORRUPT))
        if live.recent is not None:
            live.recent.note(self._spec.keys, result.statuses)
        return result

    def _verdict(self, result: HopResult) -> Verdict:
        """What came of the blocks says of the hop; nothing where some of them met a fault."""
        told = set(result.statuses) - {BlockStatus.CANCELLED}
        if not told & FAULTS:
            return Verdict.WORKED if told else Verdict.NOTHING
        if told - FAULTS or self._attached is None:
            return Verdict.NOTHING
        self._problem = self._problem or "none of a call's blocks could be moved"
        return Verdict.FAILED

    async def _guarded(self) -> HopResult:
        live = self._live
        label = live.hop.label
        if self._attached is None:  # its store was taken away a moment ago
            return self._all(BlockStatus.TIER_ERROR)
        try:
            result = await self._moved(self._attached)
        except TierGone as error:
            live.tell_gone(self._attached, error)
            return self._all(BlockStatus.TIER_ERROR)
        except TierError as error:
            self._problem = str(error)
            return self._all(BlockStatus.TIER_ERROR)
        except NoSpace as error:
            logger.debug("%s: %s", label, error)
            return self._all(no_room(error))
        except DeadlineExceeded as error:
            self._problem = str(error)
            return self._all(BlockStatus.TIMED_OUT)
        except Miss as error:
            logger.debug("%s: %s", label, error)
            return self._all(BlockStatus.MISSING)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the engine stops
            live.complaints.about(label, error, COUNTS_AS_FAILED)
            return self._all(BlockStatus.TIER_ERROR)
        # A handler may be anybody's, and serving must not notice what it raises.
        except Exception as error:  # noqa: BLE001
            live.complaints.about(label, error, COUNTS_AS_FAILED)
            self._problem = repr(error)
            return self._all(BlockStatus.TIER_ERROR)
        return result

    def _all(self, status: BlockStatus) -> HopResult:
        return HopResult((status,) * len(self._spec), 0)

    async def _moved(self, attached: Attached) -> HopResult:
        """Moved by the handler, and verified where a store's blocks came into host slots."""
        verify = self._store is not None and self._live.hop.dst == CPU_ENDPOINT
        if verify and attached.goes_on is not None:
            return await attached.goes_on.transfer_and_then(self._spec, self._verified)
        result = await attached.handler.transfer(self._spec)
        if not verify:
            self._check(result)
            return result
        return await asyncio.get_running_loop().run_in_executor(
            self._live.executor, self._verified, result
        )

    def _check(self, result: object) -> None:
        count = len(self._spec)
        if (
            not isinstance(result, HopResult)
            or len(result.statuses) != count
            or not set(map(type, result.statuses)) <= {BlockStatus}
            or result.copied_bytes < 0
        ):
            raise TypeError(
                f"the handler of {self._live.hop.label} answered {result!r} for {count} blocks; "
                "expected a HopResult with one BlockStatus per block"
            )

    def _verified(self, result: HopResult) -> HopResult:
        """Compare the bytes in the slots to their checksums, where that is due; runs in the tier's
        threads."""
        self._check(result)
        live, destination = self._live, self._spec.dst
        came = [i for i, status in enumerate(result.statuses) if status is BlockStatus.OK]
        if not came:
            return result
        if not isinstance(destination, CpuSpec):
            return self._all(BlockStatus.TIER_ERROR)
        verified = list(result.statuses)
        slots = [destination.slots[i] for i in came]
        places: list[int] = []
        blocks: list[NewBlock] = []
        for i, checksum in zip(came, live.memory.checksums(slots), strict=True):
            if checksum is None:
                verified[i] = BlockStatus.CANCELLED
            else:
                places.append(i)
                blocks.append(NewBlock(self._spec.keys[i], checksum))
        due = [True] * len(blocks) if self.watched.probe else live.verification.due(blocks)
        passed: list[NewBlock] = []
        corrupt: list[NewBlock] = []
        views = live.memory.views([destination.slots[i] for i in places])
        for i, block, view, is_due in zip(places, blocks, views, due, strict=True):
            if view is None:
                verified[i] = BlockStatus.CANCELLED
            elif is_due and not block.checksum.verifies(block.key, live.rank, view):
                verified[i] = BlockStatus.CORRUPT
                corrupt.append(block)
            elif is_due:
                passed.append(block)
        live.verification.passed(passed)
        if corrupt and self._store is not None:
            drop_corrupt(self._store, corrupt, live.hop.tier)
        return HopResult(tuple(verified), result.copied_bytes)


def drop_corrupt(store: BlockStore, blocks: Sequence[NewBlock], tier: str) -> None:
    """Log that blocks are not what their rows say, and drop them; never raises."""
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
