"""Whatever of ours raises, at whatever call: the engine lives, reads right bytes, and nothing is
lost."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.simulated import until
from tests.unit.simulation_rig import TWO_GROUPS, Stage, tokens
from tiered_kv.connector import Answer, submission
from tiered_kv.connector.backoff import Backoff
from tiered_kv.connector.books import Books
from tiered_kv.connector.conditions import Conditions
from tiered_kv.connector.gating import PrefixGate
from tiered_kv.connector.loading import Loads
from tiered_kv.connector.lookups import Lookups
from tiered_kv.connector.promoting import Promotions
from tiered_kv.connector.rank_stores import RankStores
from tiered_kv.connector.storing import Stores
from tiered_kv.connector.submission import Submission
from tiered_kv.connector.views import Mirrors
from tiered_kv.engine import TransferEngine
from tiered_kv.index import Mirror
from tiered_kv.memory import KVCaches
from tiered_kv.placement import Admission, HostCatalog
from tiered_kv.stats import StatsRecorder
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.simulation import Phase, SimulatedModel, Simulation, Workload

pytestmark = pytest.mark.faults

PARTS: tuple[type, ...] = (
    *(Lookups, Loads, Stores, Promotions, PrefixGate, Submission, RankStores),
    *(Books, Backoff, Conditions, Mirrors, Mirror, Admission, HostCatalog, TransferEngine),
)
"""What the two halves call; all their public methods are taken."""

OTHERS: tuple[tuple[type, str], ...] = (
    (KVCaches, "fence"),
    (StatsRecorder, "lookup"),
    (StatsRecorder, "evicted"),
    (StatsRecorder, "take"),
)
"""Calls of parts that others use as well."""

NOT_WHILE_SERVING = {
    *("Loads.audit", "Stores.audit", "HostCatalog.audit"),
    *("RankStores.open", "RankStores.close", "Mirrors.close", "TransferEngine.close"),
    *("Submission.close", "TransferEngine.drain", "TransferEngine.use_caches"),
    *("Mirror.poll_now", "Mirror.wait_ready"),
    # At the start.
    *("TransferEngine.wait_probed", "TransferEngine.when_gone"),
    # For people and for tests.
    *("TransferEngine.health", "TransferEngine.modes", "TransferEngine.standing"),
    *("TransferEngine.active", "TransferEngine.audit", "Promotions.audit"),
    # Where caches are registered anew.
    "Submission.give_up_all",
    # On the threads that watch the stores.
    "TransferEngine.wear",
    # Of a tier that is far, which none is here.
    *("TransferEngine.promote", "HostCatalog.unreleased"),
    # Where a block must be wanted more than once.
    "Admission.wanted",
    # Of an engine that computes slowly enough for a gate.
    *("PrefixGate.recompute_seconds", "PrefixGate.block_bytes"),
    # Of a scrub that runs, of a tier that cannot be opened.
    *("TransferEngine.is_loading", "TransferEngine.detach_failed"),
    # Asked by nobody but tests.
    "HostCatalog.slot",
    # Of blocks that requests ask to keep for a time.
    *("HostCatalog.lookup", "HostCatalog.drop"),
    # On the threads of stores that are opened; see the test of the stores that raise.
    "TransferEngine.attach",
    # What ranks say of tiers is noted and not asked for here.
    *("Conditions.note", "Conditions.state", "Conditions.load_rate"),
    # Called where a call of them failed before.
    *("Submission.refuse", "Submission.refuse_promotions"),
}
"""Not called, or not by the engine, while it serves; with the reason."""


def public_methods() -> list[tuple[type, str]]:
    found = [
        (part, name)
        for part in PARTS
        for name, value in vars(part).items()
        if not name.startswith("_") and inspect.isfunction(value)
    ]
    return [(p, n) for p, n in (*found, *OTHERS) if f"{p.__name__}.{n}" not in NOT_WHILE_SERVING]


class MistakeError(Exception):
    """One of ours."""


@dataclass
class Saboteur:
    """Raises at some calls of a method: at one, then at two in a row, then at three ..."""

    calls: int = 0
    raised: int = 0
    armed: bool = False

    def of(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def raising(*args: Any, **kwargs: Any) -> Any:
            asker = sys._getframe(1).f_globals["__name__"]
            if self.armed and not asker.startswith("tiered_kv.testing"):
                self.calls += 1
                if self.calls % 5 in ((1,), (1, 2), (1, 2, 3))[self.calls // 5 % 3]:
                    self.raised += 1
                    raise MistakeError
            return method(*args, **kwargs)

        return raising


def ask(sim: Simulation, prompt: tuple[int, ...]) -> None:
    """Have a prompt loaded, if it can be, and see that the load has begun."""
    sim.forget_device_cache()
    request = sim.add(prompt, tiers={"ssd"})
    for _ in range(15):
        if request.phase is Phase.LOADING:
            break
        sim.step()
    sim.step()


def live(sim: Simulation, stage: Stage, saboteur: Saboteur) -> None:
    """Have an engine do whatever engines do, until something was raised."""
    prompt = tokens(1, 24)
    for number in range(12):
        if number >= 2 and saboteur.raised:
            break
        sim.add(prompt)
        sim.live(Workload(abort=0.1, preempt=0.1), 20)
        until(lambda: set(sim.lookup(prompt, "ssd")) == {Answer.HIT}, 0.15)
        # Blocks that are gone when they are read, and blocks that a flush does not wait for.
        stage.disk.faults.inject(Fault(method=Method.READ, effect=Effect.NOT_FOUND))
        ask(sim, prompt)
        sim.live(Workload(abort=0.1), 5)
        stage.disk.faults.inject(Fault(method=Method.READ, effect=Effect.HANG))
        ask(sim, prompt)
        sim.reset(preempt=False)
        sim.live(Workload(), 2)
        stage.disk.faults.inject()
        stage.disk.faults.let_go()
    # What a reset would set right.
    sim.live(Workload(abort=0.1, preempt=0.1), 20)


def test_f18_the_list_of_what_is_not_called_names_what_there_is() -> None:
    known = {f"{part.__name__}.{name}" for part in PARTS for name in vars(part)}
    assert known >= NOT_WHILE_SERVING
    assert len(public_methods()) > 40


@pytest.mark.parametrize(
    ("part", "name"), public_methods(), ids=lambda v: v if isinstance(v, str) else v.__name__
)
def test_f18_an_error_at_any_call_reaches_no_engine(
    part: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "FLUSH_SECONDS", 0.02)
    saboteur = Saboteur()
    monkeypatch.setattr(part, name, saboteur.of(getattr(part, name)))
    stage = Stage(host_slots=40, retry_backoff=0.05, load_deadline=0.5)
    model = SimulatedModel(groups=TWO_GROUPS.groups, ranks=2, blocks=26, chunk=2)
    with Simulation(stage.assembly, model, seed=18) as sim:
        assert sim.wait_ready()
        sim.live(Workload(), 10)
        saboteur.armed = True
        try:
            live(sim, stage, saboteur)
        except MistakeError as error:
            pytest.fail(f"the engine got {error!r}")
        saboteur.armed = False
        sim.run()
        assert sim.settle()
        sim.step()
        sim.check_device_cache()
        counts = sim.counts
        where = f"{part.__name__}.{name}"
        errors = [sim.manager_stats, *(sim.rank_stats(rank) for rank in range(2))]
        caught = sum(
            value
            for stats in errors
            for (metric, _), value in stats.counters.items()
            if metric == "internal_errors_total"
        )
        print(
            f"{where}: raised at {saboteur.raised} of {saboteur.calls} calls, {caught:.0f} caught; "
            f"{counts.finished} requests finished, {counts.checked_blocks} blocks compared"
        )
        assert saboteur.raised > 0
        assert caught > 0
        assert counts.finished + counts.aborts.total() == counts.requests
        assert sim.audit() == ()
