"""The simulated engine's scheduler: who computes what in a step, and in which blocks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tiered_kv.connector import ConnectorMetadata
from tiered_kv.testing.simulation.blocks import NULL_BLOCK, BlockPool
from tiered_kv.testing.simulation.counts import Counts
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.testing.simulation.offloading import EngineBroken, Offloading
from tiered_kv.testing.simulation.requests import Phase, Request, Share

__all__ = ["Scheduler", "StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the ranks are to do."""

    shares: tuple[Share, ...]
    fresh: frozenset[int]
    """Engine blocks that were given out."""
    finished: tuple[str, ...]
    """Requests that were over before this step, and were not named yet."""
    message: ConnectorMetadata


class _Line:
    """Requests that do not run, the next one first: in the order of their coming, or by priority
    and then by arrival. (What was preempted comes first in the former order.)"""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """A new one."""
        if self._by_priority:
            insort(self._requests, request, key=_rank)
        else:
            self._requests.append(request)

    def put_back(self, requests: Iterable[Request]) -> None:
        """Those that were taken out; the first of them becomes the next one, unless another has a
        better priority."""
        if self._by_priority:
            for request in requests:
                insort(self._requests, request, key=_rank)
        else:
            self._requests[:0] = requests

    def take(self) -> Request:
        """The next one, taken out."""
        return self._requests.pop(0)

    def remove(self, request: Request) -> None:
        """It waits no more."""
        self._requests.remove(request)


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class Scheduler:
    """Continuous batching with chunked prefill, preemption, and asynchronous loads, in the order in
    which vLLM does it. Preempted is the newest, or by priority the least urgent, of these the one
    that arrived last."""

    def __init__(
        self,
        model: SimulatedModel,
        offloading: Offloading,
        counts: Counts,
        *,
        token_budget: int,
        most_running: int,
        hold_finished: bool,
        by_priority: bool,
        now: Callable[[], float],
    ) -> None:
        self._model = model
        self._offloading = offloading
        self._counts = counts
        self._token_budget = token_budget
        self._most_running = most_running
        self._hold_finished = hold_finished
        self.pool = BlockPool(model.blocks)
        self.requests: dict[str, Request] = {}
        """All whose blocks are not free yet."""
        self._running: list[Request] = []
        self._by_priority = by_priority
        self._now = now
        self._waiting = _Line(by_priority=by_priority)
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._finished: list[str] = []
        self._preempted: list[str] = []
        self._unsent: set[str] = set()
        self._unreceived: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something, now or when a transfer ends."""
        return bool(self.requests or self._finished or self._offloading.jobs)

    @property
    def alive(self) -> tuple[Request, ...]:
        """Requests that are not over, in the order in which they were added."""
        return tuple(request for request in self.requests.values() if not request.phase.over)

    # Requests

    def add(self, request: Request) -> None:
        """A request was added.

        Raises:
            ValueError: the name is taken, or the whole pool could never hold it.
        """
        if request.name in self.requests:
            raise ValueError(f"a request named {request.name!r} is there already")
        needed = self._model.engine_blocks(len(request.prompt) + request.answer)
        if not request.prompt or request.answer < 1 or needed > self._model.blocks - 1:
            raise ValueError(
                f"request {request.name!r} needs {needed} engine blocks of "
                f"{self._model.blocks - 1}, a prompt and at least one token of answer"
            )
        self.requests[request.name] = request
        request.arrived = self._now()
        self._waiting.add(request)
        self._offloading.on_new_request(request)

    def abort(self, request: Request) -> None:
        """The client went away. Blocks that are being loaded are freed when the load is over."""
        self._counts.aborts[request.phase.value] += 1
        loading = request.phase is Phase.LOADING and request.name not in self._received
        self._received.discard(request.name)
        self._failed.discard(request.name)
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        if loading:
            self._unreceived.add(request.name)
        self._end(request, Phase.ABORTED)

    def _end(self, request: Request, phase: Phase) -> None:
        request.phase = phase
        request.ended = self._now()
        self._offloading.on_finished(request)
        self._finished.append(request.name)
        if self._hold_finished:
            self._unsent.add(request.name)
        self._free_if_over(request)

    def _free_if_over(self, request: Request) -> None:
        if request.name in self._unsent or request.name in self._unreceived:
            return
        # What was computed is still to be offered: the tables are kept, the blocks are not.
        self.pool.release(request.used_blocks())
        del self.requests[request.name]

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it starts anew when there is room."""
        self._running.remove(request)
        self.pool.release(request.forget_blocks())
        request.phase = Phase.WAITING
        self._waiting.put_back([request])
        self._preempted.append(request.name)
        self._counts.preemptions += 1
        self._counts.preemptions_in_loads += self._offloading.loading

    def preempt_all(self) -> None:
        """Preempt all running requests, so that they run again in the same order, and take back
        what was loaded for requests that do not run yet."""
        for request in self._waiting:
            if request.phase is Phase.WAITING:
                self.pool.release(request.forget_blocks())
        for request in reversed(list(self._running)):
            self.preempt(request)

    # A step

    def schedule(self) -> StepPlan:
        """Choose what the next step computes and loads."""
        budget = self._token_budget
        fresh: set[int] = set()
        self._offloading.allocated = fresh
        shares: list[Share] = []
        for request in list(self._running):
            if request not in self._running or not budget:
                continue
            end = min(request.length, request.computed + budget)
            victims = self._make_room(request, end, fresh)
            for victim in victims:  # it may have got its share already
                given = [share for share in shares if share.request is victim]
                shares = [share for share in shares if share.request is not victim]
                budget += sum(share.end - share.start for share in given)
            if request not in victims:
                shares.append(Share(request, request.computed, end))
                budget -= end - request.computed
        if not self._preempted:
            self._admit(budget, shares, fresh)
        if not shares:
            self._break_deadlock()
        for share in shares:
            share.request.computed = share.end
        finished, self._finished = tuple(self._finished), []
        preempted, self._preempted = tuple(self._preempted), []
        message = self._offloading.build([share.request for share in shares], finished, preempted)
        return StepPlan(tuple(shares), frozenset(fresh), finished, message)

    def _make_room(self, request: Request, end: int, fresh: set[int]) -> list[Request]:
        """Preempt until there are blocks for the request; the preempted ones, itself perhaps."""
        preempted: list[Request] = []
        while request not in preempted and not self._allocate(
            request, request.computed, end, fresh
        ):
            victim = max(self._running, key=_rank) if self._by_priority else self._running[-1]
            self.preempt(victim)
            preempted.append(victim)
        return preempted

    def _allocate(self, request: Request, computed: int, end: int, fresh: set[int]) -> bool:
        """Blocks up to `end`; those that no token from `computed` on needs are left out, and
        freed where they were used."""
        self._skip(request, computed)
        wanted: list[tuple[list[int], int, int]] = []
        for number, group in enumerate(self._model.groups):
            table = request.tables[number]
            nulls = max(0, group.first_needed(computed) - len(table))
            wanted.append((table, nulls, -(-end // group.tokens) - len(table) - nulls))
        given = self.pool.allocate(sum(max(0, count) for _, _, count in wanted))
        if given is None:
            return False
        fresh.update(given)
        for table, nulls, count in wanted:
            table.extend([NULL_BLOCK] * nulls)
            if count > 0:
                table.extend(given[:count])
                del given[:count]
        return True

    def _skip(self, request: Request, computed: int) -> None:
        for number, group in enumerate(self._model.groups):
            table = request.tables[number]
            for index in range(min(group.first_needed(computed), len(table))):
                if table[index] != NULL_BLOCK:
                    self.pool.release([table[index]])
                    table[index] = NULL_BLOCK

    def _admit(self, budget: int, shares: list[Share], fresh: set[int]) -> None:
        passed_over: list[Request] = []
        while self._waiting and budget and len(self._running) < self._most_running:
            request = self._waiting.take()
            if request.phase is Phase.LOADING and not self._loaded(request):
                passed_over.append(request)
                continue
            outcome = self._start(request, budget, shares, fresh)
            if outcome is None:  # no room: nobody behind it is served first
                self._waiting.put_back([request])
                break
            if request.phase is not Phase.RUNNING:
                passed_over.append(request)
            budget -= outcome
        self._waiting.put_back(passed_over)

    def _start(
        self, request: Request, budget: int, shares: list[Share], fresh: set[int]
    ) -> int | None:
        """Begin to compute or to load; the tokens that are computed. None: there is no room."""
        external, hits = 0, 0
        if not request.computed:
            self.pool.release(request.forget_blocks())
            hits = self._device_hit(request)
            matched = self._offloading.matched(request, hits)
            if matched is None:
                return 0
            external = matched
            self._take_hits(request, hits)
        computed = max(request.computed, hits) + external
        end = computed if external else min(request.length, computed + budget)
        if not self._allocate(request, computed, end, fresh):
            if not request.computed:
                self.pool.release(request.forget_blocks())
            return None
        self._counts.device_tokens += hits
        request.computed = computed
        if external:
            request.phase = Phase.LOADING
            self._offloading.after_allocation(request, hits, computed)
            return 0
        request.phase = Phase.RUNNING
        self._running.append(request)
        shares.append(Share(request, computed, end))
        return end - computed

    def _device_hit(self, request: Request) -> int:
        """Tokens that the engine's own cache holds."""
        align = self._model.device_alignment
        for end in range((request.length - 1) // align * align, 0, -align):
            if all(
                self.pool.find(request.block_hash(number, index)) is not None
                for number, group in enumerate(self._model.groups)
                for index in range(group.first_needed(end), end // group.tokens)
            ):
                return end
        return 0

    def _take_hits(self, request: Request, end: int) -> None:
        for number, group in enumerate(self._model.groups):
            first = group.first_needed(end)
            found = [
                self.pool.find(request.block_hash(number, index))
                for index in range(first, end // group.tokens)
            ]
            blocks = [block for block in found if block is not None]
            self.pool.take(blocks)
            request.tables[number] = [NULL_BLOCK] * (end // group.tokens - len(blocks)) + blocks

    def _loaded(self, request: Request) -> bool:
        """Whether the load is over; its blocks then count, or are given back."""
        if request.name not in self._received:
            return False
        self._received.discard(request.name)
        request.phase = Phase.WAITING
        if request.name in self._failed:
            self._failed.discard(request.name)
            self.pool.release(request.forget_blocks())
            self._counts.recomputes += 1
        else:
            self._offloading.count_load(request)
            self._remember(request)
            request.computed = min(request.computed, request.length - 1)
        return True

    def _break_deadlock(self) -> None:
        """Requests whose loads are over hold blocks, and none gets what it needs to go on: the
        last of them gives its blocks back."""
        loading = (r for r in self._waiting if r.phase is Phase.LOADING)
        if self._running or any(request.name not in self._received for request in loading):
            return
        for request in reversed(list(self._waiting)):
            if request.used_blocks() and len(self._waiting) > 1:
                self._loaded(request)
                self.pool.release(request.forget_blocks())
                return

    # After a step

    def received(self, names: frozenset[str], failed: frozenset[str]) -> None:
        """Loads are over on all ranks.

        Raises:
            EngineBroken: the request is unknown, or none of its loads runs.
        """
        for name in sorted(names):
            request = self.requests.get(name)
            if request is None or (
                request.phase is not Phase.LOADING and name not in self._unreceived
            ):
                raise EngineBroken(f"{name!r} was received, but is not being loaded")
            if name in self._unreceived:
                self._unreceived.discard(name)
                self._free_if_over(request)
                continue
            self._received.add(name)
            if name in failed:
                self._failed.add(name)
                self._counts.failed_loads += 1
                request.computed = 0  # nothing of it may be stored, whatever comes first

    def sent(self, names: frozenset[str]) -> None:
        """The stores of finished requests are over on all ranks.

        Raises:
            EngineBroken: no finished request of this name has blocks.
        """
        for name in sorted(names):
            if not self._hold_finished:
                continue
            if name not in self._unsent:
                raise EngineBroken(f"{name!r} was sent, but its blocks are not held for that")
            self._unsent.discard(name)
            self._counts.sent += 1
            self._free_if_over(self.requests[name])

    def after_forward(self, shares: tuple[Share, ...]) -> list[Request]:
        """Tokens were computed; the requests that got a new one."""
        grown: list[Request] = []
        for share in shares:
            request = share.request
            self._counts.computed_tokens += share.end - share.start
            self._remember(request)
            if share.end < request.length:
                continue
            request.generate()
            grown.append(request)
            if request.first_token is None:
                request.first_token = self._now()
            if request.answered:
                self._running.remove(request)
                self._counts.finished += 1
                self._end(request, Phase.FINISHED)
        return grown

    def _remember(self, request: Request) -> None:
        for number, group in enumerate(self._model.groups):
            for index in range(min(request.computed // group.tokens, len(request.tables[number]))):
                block = request.tables[number][index]
                self.pool.remember(block, request.block_hash(number, index))
