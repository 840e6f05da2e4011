"""An inference engine's life without an inference engine, for tests of tiers and of the connector.

`Simulation` drives a real manager half and one real worker half per rank through what vLLM does
with its KV connector: continuous batching, preemption, aborts, reuse of engine blocks, resets and
failed loads. It compares all bytes before they are read.
"""

from tiered_kv.testing.simulation.assembling import assemble
from tiered_kv.testing.simulation.border import crossed
from tiered_kv.testing.simulation.counts import Counts
from tiered_kv.testing.simulation.engine import Simulation
from tiered_kv.testing.simulation.model import SimulatedGroup, SimulatedModel
from tiered_kv.testing.simulation.offloading import EngineBroken
from tiered_kv.testing.simulation.oracle import ContentMismatch
from tiered_kv.testing.simulation.pace import Pace, RealTime, StepCost, VirtualTime
from tiered_kv.testing.simulation.requests import Phase, Request
from tiered_kv.testing.simulation.workload import Workload

__all__ = [
    "ContentMismatch",
    "Counts",
    "EngineBroken",
    "Pace",
    "Phase",
    "RealTime",
    "Request",
    "SimulatedGroup",
    "SimulatedModel",
    "Simulation",
    "StepCost",
    "VirtualTime",
    "Workload",
    "assemble",
    "crossed",
]
