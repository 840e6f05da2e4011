"""F3: a tier says OK of bytes that are not the block's: the engine never reads them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.unit.simulation_rig import load_prompt, store_prompt, tokens
from tiered_kv.testing.faults import Effect, Fault, Faults, Method
from tiered_kv.testing.simulation import SimulatedModel, Simulation, assemble

TWO_RANKS = SimulatedModel(blocks=40, ranks=2, chunk=2)
PROMPT = tokens(1, 32)
DEPLOYMENT = """\
tiers:
  - {{name: host, type: cpu, capacity: 256KiB}}
  - {{name: real, type: {type}, path: {path}, capacity: 64MiB, min_free: 0%}}
recompute: {{gate: off}}
limits: {{load_deadline: 20s, store_deadline: 20s, retry_backoff: 200ms}}
"""
"""Without a gate: to compute takes nothing here, and a load would be given up after 0.1 s."""


@pytest.mark.parametrize("effect", [Effect.FLIP, Effect.SHORT, Effect.LIE, Effect.FOREIGN])
@pytest.mark.parametrize("method", [Method.READ, Method.WRITE])
@pytest.mark.parametrize("type_", ["nvme", "lmdb"])
def test_f3_what_a_tier_vouches_for_wrongly_never_reaches_the_engine(
    type_: str, method: Method, effect: Effect, tmp_path: Path
) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(type=type_, path=tmp_path / "tier"))
    faults = Faults(tier="real")
    lie = Fault(method=method, effect=effect, positions=(1,))
    with Simulation(assemble(file, faults={"real": faults}), TWO_RANKS) as sim:
        if method is Method.WRITE:
            faults.inject(lie)
        store_prompt(sim, PROMPT, "real")
        if method is Method.READ:
            faults.inject(lie)
        request = load_prompt(sim, PROMPT, {"real"})
        met = faults.injected_blocks()[method, effect]
        found: Counter[str] = Counter()  # by loads, and by background reads, which may be sooner
        for worker in sim.workers:
            found.update(worker.stats.snapshot().tier("real").corrupt)
        print(f"{met} blocks met {effect} at {method}; found: {dict(found)}\n{sim.counts}")
        assert met > 0
        assert sim.counts.failed_loads > 0
        assert set(sim.counts.failed_blocks) <= {"corrupt", "missing"}
        assert sim.counts.failed_blocks["corrupt"] > 0 or found["probe"] > 0
        assert sim.counts.recomputes > 0
        sim.check_device_cache()
        assert sim.audit() == ()
    alone = tmp_path / "alone.yaml"
    alone.write_text(DEPLOYMENT.format(type=type_, path=tmp_path / "other"))
    with Simulation(assemble(alone), TWO_RANKS) as without:
        assert load_prompt(without, PROMPT, None).output == request.output


def test_faults_for_a_tier_that_is_not_there_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(DEPLOYMENT.format(type="nvme", path=tmp_path / "tier"))
    for name in ("rael", "host"):
        with pytest.raises(ValueError, match=f"no tier '{name}' with a store"):
            assemble(file, faults={name: Faults()})
