"""Everything at once, drawn by a seed: an engine's life with tiers that fail and hang."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.simulation_rig import FULL, WINDOW, Stage
from tiered_kv.testing.faults import Effect, Fault, Method
from tiered_kv.testing.memory_tier import MemoryDisk
from tiered_kv.testing.simulation import SimulatedGroup, SimulatedModel, Simulation, Workload
from tiered_kv.values import BlockKey

SMALL_POOL = SimulatedModel(groups=(FULL, WINDOW), ranks=2, blocks=36, chunk=2)
ONE_GROUP = SimulatedModel(groups=(SimulatedGroup(),), ranks=2, blocks=30)

STEPS = 500
LONGEST = 8
"""Times `STEPS`, until enough has happened."""


class Chaos:
    """Makes a disk fail, hang, lose and spoil blocks, as its own source of numbers says."""

    def __init__(self, disk: MemoryDisk, seed: int) -> None:
        self._disk = disk
        self._random = random.Random(f"chaos {seed}")
        self._bad_until = 0
        self._unreadable: dict[BlockKey, Effect] = {}
        self._before = disk.faults.injected()
        self._did: Counter[str] = Counter()

    @property
    def did(self) -> Counter[str]:
        """What was done so far."""
        injected = self._disk.faults.injected() - self._before
        return self._did + Counter({f"{m} {e}": n for (m, e), n in injected.items()})

    def _inject(self) -> None:
        """Bad times, if they are now, and blocks that cannot be read."""
        bad = [
            Fault(method=method, effect=effect, chance=chance)
            for method in (Method.RESERVE, Method.WRITE, Method.PUBLISH, Method.READ)
            for effect, chance in (
                (Effect.TIER_ERROR, 1 / 4),
                (Effect.NO_SPACE, 1 / 3),
                (Effect.BUG, 1 / 2),
                (Effect.EIO, 1.0),
            )
        ]
        unreadable = (
            Fault(method=Method.READ, effect=effect, keys=frozenset([key]))
            for key, effect in self._unreadable.items()
        )
        self._disk.faults.inject(
            *(bad if self._bad_until else ()), *unreadable, seed=self._random.randrange(2**32)
        )

    def step(self, number: int) -> None:
        disk, draw = self._disk, self._random.random
        if self._bad_until and number >= self._bad_until:
            self._bad_until = 0
            self._inject()
        if not self._bad_until and draw() < 0.02:
            self._bad_until = number + 4
            self._did["bad times"] += 1
            self._inject()
        for name, valve in (("reads", disk.reading), ("writes", disk.writing)):
            if draw() < 0.03:
                valve.shut()
                self._did[f"{name} hang"] += 1
            elif draw() < 0.12:
                valve.open()
        keys = sorted(disk.keys())
        if keys and draw() < 0.1:
            disk.spoil(self._random.choice(keys))
            self._did["bits flipped"] += 1
        if keys and draw() < 0.05:
            effect = self._random.choice([Effect.BLOCK_ERROR, Effect.VANISH])
            self._unreadable[self._random.choice(keys)] = effect
            self._did["blocks unreadable"] += 1
            self._inject()

    def end(self) -> None:
        self._bad_until = 0
        self._unreadable.clear()
        self._inject()


@pytest.mark.parametrize("model", [SMALL_POOL, ONE_GROUP], ids=["two groups", "one group"])
@pytest.mark.parametrize("seed", range(2))
def test_no_wrong_byte_and_no_leak_in_a_life_among_failing_tiers(
    seed: int, model: SimulatedModel
) -> None:
    # Two lives on the same disk: the second meets what the first left there.
    stage = Stage(host_slots=20, load_deadline=0.25, retry_backoff=0.1, stores=("ssd", "far"))
    happened: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    loaded: Counter[str] = Counter()
    for life in range(2):
        with Simulation(
            stage.assembly,
            model,
            seed=seed * 2 + life,
            late_outputs=0.1,
            repeated_messages=0.1,
            hold_finished=bool(life) and seed == 1,
        ) as sim:
            assert sim.wait_ready()
            chaos = Chaos(stage.disk, seed * 2 + life)
            workload = Workload(abort=0.08, preempt=0.05, reset=0.002 if life else 0.0)
            for number in range(LONGEST * STEPS):
                chaos.step(number)
                sim.live(workload, 1)
                enough = happened["recomputes"] + sim.counts.recomputes >= 10
                if number >= STEPS and (enough or not life):
                    break  # on a slow machine tiers are out of use for more of the steps
            chaos.end()
            stage.open()
            sim.run()
            assert sim.settle()
            sim.check_device_cache()
            assert sim.audit() == ()
            counts = sim.counts
            assert counts.finished + counts.aborts.total() == counts.requests
            failed.update(counts.failed_blocks)
            loaded.update(counts.loaded_blocks)
            for name in ("preemptions", "resets", "recomputes", "flushes", "late_outputs"):
                happened[name] += getattr(counts, name)
            happened["aborts while loading"] += counts.aborts["loading"]
            happened["blocks checked"] += counts.checked_blocks
            happened.update(chaos.did)
            print(f"life {life}\n{counts}\n")
    print(dict(happened), "\nfailed:", dict(failed), "\nloaded:", dict(loaded))
    assert min(happened[name] for name in ("preemptions", "recomputes", "flushes")) >= 10
    assert happened["blocks checked"] > 20_000
    assert loaded["ssd"] + loaded["far"] >= 50
    assert loaded["host"] >= 50
    assert failed.total() >= 20
    assert len(failed) >= 3
