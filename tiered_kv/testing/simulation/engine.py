"""The simulated engine: steps in vLLM's order over real manager, worker halves and tiers."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Self

from tiered_kv.connector import Answer, ConnectorMetadata, Manager, WorkerConnector, WorkerReport
from tiered_kv.connector.assembly import Assembly
from tiered_kv.stats import StatsDelta, StatsSnapshot
from tiered_kv.testing.faults import PATIENCE
from tiered_kv.testing.simulation.border import crossed
from tiered_kv.testing.simulation.counts import Counts
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.testing.simulation.offloading import Offloading
from tiered_kv.testing.simulation.oracle import Oracle, RankCaches
from tiered_kv.testing.simulation.pace import Pace, RealTime
from tiered_kv.testing.simulation.ranks import Rank, RankOutput
from tiered_kv.testing.simulation.requests import Phase, Request, Share
from tiered_kv.testing.simulation.scheduler import Scheduler, StepPlan
from tiered_kv.testing.simulation.workload import Workload
from tiered_kv.values import BlockKey

__all__ = ["Simulation"]

_IDLE_SECONDS = 0.02
"""How long a step without computation waits for a transfer to end."""
_TICK_SECONDS = 0.002

_NOTHING = StepPlan((), frozenset(), (), ConnectorMetadata())


class Simulation:
    """An inference engine without a model: it schedules, computes, preempts, aborts and reuses
    engine blocks as vLLM does, and its KV cache is loaded and stored by tiered-kv.

    Before the engine reads an engine block, all its bytes are compared to what was computed for
    these tokens (`ContentMismatch` where they differ). What vLLM would not survive raises
    `EngineBroken`.

    What is asked of it is a function of `seed`; in which step a transfer ends is up to threads,
    as in a real engine, unless `lockstep` is set. One thread uses it.
    """

    def __init__(
        self,
        assembly: Assembly,
        model: SimulatedModel | None = None,
        *,
        seed: int = 0,
        token_budget: int = 64,
        most_running: int = 8,
        hold_finished: bool = False,
        lockstep: bool = False,
        late_outputs: float = 0.0,
        repeated_messages: float = 0.0,
        by_priority: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """Start the manager and the ranks.

        Args:
            assembly: deployment and backends, as for a real engine. Its directories may have been
                used before.
            model: shape of the KV cache.
            seed: of everything that is drawn.
            token_budget: tokens that a step computes at most.
            most_running: requests that run at once at most.
            hold_finished: keep a finished request's engine blocks until all ranks have named it
                as sent, instead of fencing its stores (engines before `jobs_to_flush`).
            lockstep: every step waits until the jobs that its ranks run have ended.
            late_outputs: chance that the output of a rank arrives a step later.
            repeated_messages: chance that a rank gets the message of a step twice.
            by_priority: serve and preempt by the requests' priorities, not by their arrival.
            pace: the time that it lives in; the machine's, with steps that cost nothing but what
                the simulation takes, if not given. The manager half goes by it; transfers are
                real, and take the machine's time.

        Raises:
            RefuseToStart: as a real engine's start.
        """
        self.model = SimulatedModel() if model is None else model
        self.counts = Counts()
        self.random = random.Random(seed)
        self.pace: Pace = RealTime() if pace is None else pace
        """What the time is."""
        self._lockstep = lockstep
        self._late_chance = late_outputs
        self._repeat_chance = repeated_messages
        self._oracle = Oracle(self.model, self.counts)
        self._late: list[RankOutput] = []
        self._received: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._sent: Counter[str] = Counter()
        self._names = 0
        self._ranks: list[Rank] = []
        self.manager: Manager = assembly.manager(
            self.model.fingerprint, self.model.ranks, clock=self.pace
        )
        """The real manager half."""
        self.manager_stats = StatsSnapshot(0.0)
        """All that the manager half handed out so far."""
        try:
            for rank in range(self.model.ranks):
                self._ranks.append(Rank(assembly, self.model, rank, self._oracle))
            self.manager.attach(
                [rank.handshake() for rank in self._ranks],
                [group.window and group.window - 1 for group in self.model.groups],
            )
        except BaseException:
            self.close()
            raise
        self._offloading = Offloading(
            self.manager, self.model, self.counts, fence_finished=not hold_finished
        )
        self._scheduler = Scheduler(
            self.model,
            self._offloading,
            self.counts,
            token_budget=token_budget,
            most_running=most_running,
            hold_finished=hold_finished,
            by_priority=by_priority,
            now=self.pace,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def workers(self) -> tuple[WorkerConnector, ...]:
        """The real worker halves, by rank."""
        return tuple(rank.worker for rank in self._ranks)

    def caches(self, rank: int) -> RankCaches:
        """The engine's KV caches of a rank, for a test to look at or to spoil."""
        return self._ranks[rank].caches

    def rank_stats(self, rank: int) -> StatsSnapshot:
        """All that a rank's worker half has handed out so far, put together."""
        return self._ranks[rank].stats

    # Requests

    def add(
        self,
        prompt: Sequence[int],
        answer: int = 1,
        *,
        name: str | None = None,
        tiers: Collection[str] | None = None,
        priority: int = 0,
    ) -> Request:
        """Add a request.

        Args:
            prompt: its tokens.
            answer: how many tokens to generate.
            name: its id; by default one that was not used before.
            tiers: tiers that may answer it; None: all.
            priority: see `Request.priority`.

        Raises:
            ValueError: the name is taken, or the pool could never hold the request.
        """
        if name is None:
            name = f"request-{self._names}"
            self._names += 1
        allowed = None if tiers is None else frozenset(tiers)
        request = Request(
            name, self.model, tuple(prompt), answer, allowed, priority, self.counts.requests
        )
        self._scheduler.add(request)
        self._oracle.learn(request, 0, request.length)
        self.counts.requests += 1
        return request

    def abort(self, request: Request) -> None:
        """The client went away; nothing where the request is over."""
        if not request.phase.over:
            self._scheduler.abort(request)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away, as for want of room; nothing where it does not run."""
        if request.phase is Phase.RUNNING:
            self._scheduler.preempt(request)

    def reset(self, *, new_weights: bool = False, preempt: bool = True) -> None:
        """Reset the connector's cache, and the engine's own.

        Args:
            new_weights: the weights change with it, so that every block stored so far is wrong
                now. Requests that are being loaded are aborted then.
            preempt: preempt what runs. Without it requests go on with the blocks that they have,
                and the engine's own cache is kept.

        Raises:
            ValueError: new weights, and requests that would go on with KV of the old ones.
        """
        if new_weights and not preempt:
            raise ValueError("new weights need preempt=True: running requests have KV of the old")
        if new_weights:
            for request in self._scheduler.alive:
                if request.phase is Phase.LOADING:
                    self._scheduler.abort(request)
            self._oracle.change_weights()
        if preempt:
            self._scheduler.preempt_all()
            self._scheduler.pool.forget_all()
        self._offloading.reset()
        self.counts.resets += 1

    def forget_device_cache(self) -> None:
        """Find nothing in the engine's own prefix cache, so that tiers are asked."""
        self._scheduler.pool.forget_all()

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether anything is still to be done, or to end, for a request."""
        return self._scheduler.has_work or bool(self._late)

    def step(self) -> None:
        """One step of the engine.

        Raises:
            ContentMismatch: it would have read wrong bytes.
            EngineBroken: the connector did what an engine does not survive.
        """
        plan = self._scheduler.schedule()
        self._turn(plan)
        if not plan.shares and self.has_work:
            self._idle()

    def run(self, *, most_steps: int = 20_000) -> None:
        """Step until nothing is left to do.

        Raises:
            ContentMismatch: see `step`.
            EngineBroken: see `step`; or not all was done within `most_steps`.
        """
        for _ in range(most_steps):
            if not self.has_work:
                return
            self.step()
        alive = [f"{r.name} ({r.phase.value})" for r in self._scheduler.requests.values()]
        raise TimeoutError(
            f"not done after {most_steps} steps: requests {', '.join(alive) or 'none'}; "
            f"jobs {sorted(self._offloading.jobs)}"
        )

    def live(self, workload: Workload, steps: int) -> None:
        """Step while requests come and go at random.

        Raises:
            ContentMismatch: see `step`.
            EngineBroken: see `step`.
        """
        shared = [
            self._tokens(*workload.prefix_tokens, beginning=number)
            for number in range(workload.prefixes)
        ]
        for _ in range(steps):
            self._draw(workload, shared)
            self.step()

    def _draw(self, workload: Workload, shared: Sequence[tuple[int, ...]]) -> None:
        alive = self._scheduler.alive
        if self.random.random() < workload.arrivals and len(alive) < workload.most_alive:
            beginning = self.random.choice(shared)
            prompt = (*beginning, *self._tokens(*workload.prompt_tokens))
            answer = self.random.randint(*workload.answer_tokens)
            priority = self.random.randint(0, workload.priorities - 1)
            self.add(prompt[: self.model.most_tokens - answer], answer, priority=priority)
        if alive and self.random.random() < workload.abort:
            self.abort(self.random.choice(alive))
        if alive and self.random.random() < workload.preempt:
            self.preempt(self.random.choice(alive))
        if self.random.random() < workload.reset:
            preempt = workload.new_weights or self.random.random() < 0.5
            self.reset(new_weights=workload.new_weights, preempt=preempt)

    def _tokens(self, least: int, most: int, beginning: int | None = None) -> tuple[int, ...]:
        # A beginning has tokens of its own, so that it is the same in another life of the engine.
        source = self.random if beginning is None else random.Random(f"beginning {beginning}")
        return tuple(source.randrange(50_000) for _ in range(source.randint(least, most)))

    def _turn(self, plan: StepPlan) -> None:
        self.counts.steps += 1
        began = self.pace()
        outputs = [
            rank.step(
                plan.message,
                plan.shares,
                plan.fresh,
                plan.finished,
                repeated=self._happens(self._repeat_chance, "repeated_messages"),
                wait=self._lockstep,
            )
            for rank in self._ranks
        ]
        self._pass_time(plan.shares, began)
        self._hear(outputs)
        for request in self._scheduler.after_forward(plan.shares):
            self._oracle.learn(request, request.length - 1, request.length)

    def _pass_time(self, shares: Sequence[Share], began: float) -> None:
        """A step takes its time, and the manager half hears how long its prompts took."""
        if not shares:
            return
        prefilled = sum(share.end - share.start for share in shares if not share.decodes)
        decodes = any(share.decodes for share in shares)
        cost = self.pace.cost.seconds(prefilled, decodes=decodes)
        self.pace.spend(began, cost)
        if prefilled:
            self.manager.note_step(prefilled, cost or self.pace() - began)

    def _happens(self, chance: float, count: str) -> bool:
        happens = chance > 0 and self.random.random() < chance
        if happens:
            setattr(self.counts, count, getattr(self.counts, count) + 1)
        return happens

    def _hear(self, outputs: Iterable[RankOutput]) -> None:
        """Put the ranks' outputs together, in whatever order they come, as vLLM's aggregator
        does: a request is received when every rank has said so, and failed when any has."""
        late = {output.rank: output for output in self._late}
        self._late = []
        arrived: list[RankOutput] = []
        for output in outputs:
            whole = late[output.rank].and_then(output) if output.rank in late else output
            if self._happens(self._late_chance, "late_outputs"):
                self._late.append(whole)
            else:
                arrived.append(whole)
        self.random.shuffle(arrived)
        report = WorkerReport()
        for output in arrived:
            report = report.merged(output.report)
            self._failed |= output.failed
            self._received.update(output.received)
            self._sent.update(output.sent)
        if report:
            self._offloading.take_report(crossed(report))
        for output in arrived:
            for job in output.completed:
                self._offloading.completed(output.rank, job)
        received = self._complete(self._received)
        failed = frozenset(self._failed & received)
        self._failed -= failed
        self._scheduler.received(received, failed)
        self._scheduler.sent(self._complete(self._sent))
        delta = self.manager.take_stats()
        if delta is not None:
            self.manager_stats = self.manager_stats.merge(StatsDelta.from_dict(delta.as_dict()))

    def _complete(self, counted: Counter[str]) -> frozenset[str]:
        whole = frozenset(name for name, ranks in counted.items() if ranks >= self.model.ranks)
        for name in whole:
            del counted[name]
        return whole

    def _idle(self) -> None:
        began = time.monotonic()
        jobs = self._offloading.jobs
        for rank in self._ranks:
            if jobs:
                rank.worker.engine.wait(jobs, began + _IDLE_SECONDS - time.monotonic())
        threading.Event().wait(_TICK_SECONDS)  # mirrors, and write-behind, go on meanwhile
        self.pace.waited(time.monotonic() - began)

    # The end

    def settle(self, timeout: float = PATIENCE) -> bool:
        """Let every transfer end, write-behind too, and hear of it; nothing is computed.

        Returns:
            False where something still runs after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while True:
            ended = all(
                rank.worker.drain(max(0.0, until - time.monotonic())) for rank in self._ranks
            )
            self._turn(_NOTHING)
            if ended and not self._late and not self._offloading.jobs:
                return True
            if time.monotonic() >= until:
                return False

    def wait_ready(self, timeout: float = PATIENCE) -> bool:
        """Wait until every store's keys are known to the manager; False after `timeout` s."""
        return _until(
            lambda: all(state == "ready" for state in self.manager.states().values()), timeout
        )

    def wait_found(
        self, prompt: Sequence[int], tier: str | None = None, timeout: float = PATIENCE
    ) -> bool:
        """Wait until all whole blocks of a prompt are hits, in one tier or anywhere; False after
        `timeout` seconds."""
        return _until(lambda: set(self.lookup(prompt, tier)) == {Answer.HIT}, timeout)

    def lookup(self, prompt: Sequence[int], tier: str | None = None) -> list[Answer]:
        """What the manager says of all whole blocks of a prompt, group by group."""
        probe = Request("lookup", self.model, tuple(prompt), 1)
        keys = [key for group in range(len(self.model.groups)) for key in probe.keys(group)]
        tiers = None if tier is None else frozenset({tier})
        self.manager.on_new_request(probe.name, tiers)
        self.manager.lookup(probe.name, keys, 0)
        answers = [self.manager.answer(probe.name, key) for key in keys]
        self.manager.on_request_finished(probe.name)
        return answers

    def blocks(self, prompt: Sequence[int], rank: int = 0) -> dict[BlockKey, bytes]:
        """What a rank's part of each whole block of a prompt must be, as it lies in a store."""
        request = Request("blocks", self.model, tuple(prompt), 1)
        return {
            key: self._oracle.block_bytes(request, rank, group, index)
            for group in range(len(self.model.groups))
            for index, key in enumerate(request.keys(group))
        }

    @property
    def free_blocks(self) -> int:
        """Engine blocks that nobody uses."""
        return self._scheduler.pool.free

    def check_device_cache(self) -> int:
        """Compare every block that the engine's own cache would find; how many.

        Raises:
            ContentMismatch: a byte differs.
        """
        known = self._scheduler.pool.known()
        for rank in self._ranks:
            self._oracle.check_blocks(known, rank.caches, rank.rank)
        return len(known)

    def audit(self) -> tuple[str, ...]:
        """What is left over once no request is: blocks, slots, pins, memory of requests. Call it
        after `run` and `settle`; empty in a sound program."""
        wrong = [*self._scheduler.pool.audit(), *self.manager.audit()]
        if self._offloading.tracked or self._offloading.jobs:
            wrong.append(
                f"{self._offloading.tracked} requests and {len(self._offloading.jobs)} jobs are "
                "remembered by the engine"
            )
        for rank in self._ranks:
            wrong.extend(f"rank {rank.rank}: {what}" for what in rank.audit())
        return tuple(wrong)

    def close(self) -> None:
        """Shut the ranks and the manager down. Idempotent."""
        for rank in self._ranks:
            rank.worker.shutdown()
        self.manager.close()


def _until(condition: Callable[[], bool], timeout: float) -> bool:
    until = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= until:
            return False
        threading.Event().wait(_TICK_SECONDS)
    return True
