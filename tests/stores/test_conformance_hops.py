"""cpu <-> nvme, cpu <-> lmdb: the hops that come with a store."""

from __future__ import annotations

import pytest

from tests.stores.lmdb_parts import open_lmdb
from tests.stores.nvme_parts import open_nvme
from tiered_kv.specs import CpuSpec
from tiered_kv.testing.conformance.handlers import (
    CpuToStoreConformance,
    HandlerCase,
    StoreToCpuConformance,
)
from tiered_kv_lmdb import LmdbSpec
from tiered_kv_lmdb import backend as lmdb
from tiered_kv_nvme import NvmeSpec
from tiered_kv_nvme import backend as nvme


class TestCpuToNvme(CpuToStoreConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(nvme, CpuSpec, NvmeSpec, open_store=open_nvme)


class TestNvmeToCpu(StoreToCpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(nvme, NvmeSpec, CpuSpec, open_store=open_nvme)


class TestCpuToLmdb(CpuToStoreConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(lmdb, CpuSpec, LmdbSpec, open_store=open_lmdb)


class TestLmdbToCpu(StoreToCpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(lmdb, LmdbSpec, CpuSpec, open_store=open_lmdb)
