"""Our stores are stores."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.stores.conformance_cases import LMDB, LMDB_MAP, NVME, STRIPED
from tiered_kv.testing.conformance.stores import StoreArguments, StoreCase, StoreConformance
from tiered_kv.testing.conformance.stores.reading import ReadingChecks
from tiered_kv_nvme.posix import probe_direct

MIB = 2**20
LARGE = (*NVME.sizes, 8191, 66_048, 262_144 + 17, MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB)


class TestNvme(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return NVME


class TestStripedNvme(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return STRIPED


class TestLmdb(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return LMDB


class TestLmdbIntoMap(StoreConformance):
    @pytest.fixture
    def case(self) -> StoreCase:
        return LMDB_MAP


class TestNvmeBytes(ReadingChecks):
    """Blocks beyond one I/O group, on the disk (ext4: direct) and on tmpfs, which buffers."""

    @pytest.fixture
    def case(self) -> StoreCase:
        return replace(NVME, capacity=160 * MIB, sizes=LARGE)

    @pytest.fixture(params=["direct", "buffered"])
    def arguments(
        self, request: pytest.FixtureRequest, case: StoreCase, tmp_path: Path
    ) -> Iterator[StoreArguments]:
        extra = (("segment", 9 * MIB),)
        if request.param == "direct":
            if not probe_direct(tmp_path).direct:
                pytest.skip(f"{tmp_path} is {probe_direct(tmp_path)}")
            yield StoreArguments(tmp_path / "tier", case.capacity, extra=extra)
            return
        shared = Path("/dev/shm")
        if not shared.is_dir() or probe_direct(shared).direct:
            pytest.skip("no /dev/shm that buffers")
        folder = Path(tempfile.mkdtemp(dir=shared))
        try:
            yield StoreArguments(folder / "tier", case.capacity, extra=extra)
        finally:
            shutil.rmtree(folder)
