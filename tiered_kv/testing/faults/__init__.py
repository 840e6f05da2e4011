"""Faults on purpose: in any store, in any hop, where and when a test wants them.

```py
faults = Faults(
    Fault(method=Method.READ, effect=Effect.FLIP, every=3),
    Fault(method=Method.WRITE, effect=Effect.NO_SPACE, calls=(2,)),
)
store = FaultyStore(my_store, faults)  # or, for a whole deployment:
backend = faulty_backend(my_backend, faults)
...
assert faults.injected()[Method.READ, Effect.FLIP] > 0
```

`plan` says what can go wrong, `injecting` decides when, `stores` does it, `valves` holds calls up.
"""

from tiered_kv.testing.faults.injecting import Faults, Injection
from tiered_kv.testing.faults.plan import Effect, Fault, FaultPlan, Method
from tiered_kv.testing.faults.stores import FaultyStore, faulty_backend
from tiered_kv.testing.faults.valves import PATIENCE, Valve, hold_hop

__all__ = [
    "PATIENCE",
    "Effect",
    "Fault",
    "FaultPlan",
    "Faults",
    "FaultyStore",
    "Injection",
    "Method",
    "Valve",
    "faulty_backend",
    "hold_hop",
]
