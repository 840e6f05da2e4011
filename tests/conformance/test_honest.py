"""A plain store and plain direct handlers, that keep every promise, pass the suites."""

from __future__ import annotations

import pytest

from tests.conformance.direct import DirectLoad, DirectStore, MemorySpec, direct_case
from tests.conformance.honest import memory_case
from tiered_kv.specs import GpuSpec
from tiered_kv.testing.conformance.handlers import (
    GpuToStoreConformance,
    HandlerCase,
    StoreToGpuConformance,
)
from tiered_kv.testing.conformance.stores import StoreCase, StoreConformance


class TestStoreInMemory(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return memory_case()


class TestDirectStore(GpuToStoreConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return direct_case(GpuSpec, MemorySpec, DirectStore)


class TestDirectLoad(StoreToGpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return direct_case(MemorySpec, GpuSpec, DirectLoad)
