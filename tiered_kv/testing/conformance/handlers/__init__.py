"""What every `TransferHandler` owes, as pytest classes, one per kind of pair.

```python
from tiered_kv.testing.conformance.handlers import HandlerCase, StoreToGpuConformance


class TestMyLoads(StoreToGpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(my_package.backend, MySpec, GpuSpec, open_store=open_mine)
```

Where the handler's driver needs an environment of its own, run the instance in a child process:
`tiered_kv.testing.conformance.runs`.
"""

try:
    from tiered_kv.testing.conformance.handlers.case import HandlerCase
    from tiered_kv.testing.conformance.handlers.suite import (
        CpuToGpuConformance,
        CpuToStoreConformance,
        GpuToCpuConformance,
        GpuToStoreConformance,
        HandlerConformance,
        StoreToCpuConformance,
        StoreToGpuConformance,
    )
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise
    raise ModuleNotFoundError(
        "the conformance suites run under pytest, which is not installed; "
        "pip install 'tiered-kv[testing]'",
        name=error.name,
    ) from error

__all__ = [
    "CpuToGpuConformance",
    "CpuToStoreConformance",
    "GpuToCpuConformance",
    "GpuToStoreConformance",
    "HandlerCase",
    "HandlerConformance",
    "StoreToCpuConformance",
    "StoreToGpuConformance",
]
