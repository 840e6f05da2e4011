"""What every `BlockStore` owes, as a pytest class.

```python
from tiered_kv.testing.conformance.stores import StoreArguments, StoreCase, StoreConformance


def open_mine(arguments: StoreArguments) -> BlockStore: ...


class TestMyStore(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return StoreCase(open_mine)
```

What a store cannot do is declared in its case, and the checks of it are skipped with that name.
"""

from tiered_kv.testing.conformance.blocks import StoreArguments

try:
    from tiered_kv.testing.conformance.stores.case import StoreCase
    from tiered_kv.testing.conformance.stores.suite import StoreConformance
except ModuleNotFoundError as error:
    if error.name not in {"pytest", "hypothesis"}:
        raise
    raise ModuleNotFoundError(
        f"the conformance suites run under pytest, and {error.name} is not installed; "
        "pip install 'tiered-kv[testing]'",
        name=error.name,
    ) from error

__all__ = ["StoreArguments", "StoreCase", "StoreConformance"]
