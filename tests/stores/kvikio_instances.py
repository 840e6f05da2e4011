"""nvme with KvikIO, for a process with a fake CUDA driver: run by `test_conformance_kvikio`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.loaded_cuda_driver import driver
from tests.stores.conformance_cases import EXAMPLES, KILLS
from tests.stores.kvikio_parts import open_direct, open_kvikio
from tiered_kv.specs import GpuSpec
from tiered_kv.testing.conformance.handlers import (
    GpuToStoreConformance,
    HandlerCase,
    StoreToGpuConformance,
)
from tiered_kv.testing.conformance.stores import StoreCase, StoreConformance
from tiered_kv_nvme import NvmeSpec, backend


class TestKvikioStore(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return StoreCase(open_kvikio, kills=KILLS, examples=EXAMPLES // 2, plain_files=False)


class CountedCopies:
    """The handlers' blocks pass through what stands for device memory, by KvikIO."""

    @pytest.fixture(autouse=True, scope="class")
    def copies(self) -> Iterator[None]:
        before = driver.copies()
        yield
        made = driver.copies() - before
        print(f"{made} copies to and from device memory")
        assert made > 0


class TestGpuToNvme(CountedCopies, GpuToStoreConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(backend, GpuSpec, NvmeSpec, open_store=open_direct)


class TestNvmeToGpu(CountedCopies, StoreToGpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(backend, NvmeSpec, GpuSpec, open_store=open_direct)
