"""gpu <-> cpu: our handlers are handlers, with both ways of copying."""

from __future__ import annotations

import pytest

from tests.unit.gpu_rig import KINDS
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.testing.conformance.handlers import (
    CpuToGpuConformance,
    GpuToCpuConformance,
    HandlerCase,
)
from tiered_kv_gpu import backend


class BothCopies:
    @pytest.fixture(params=sorted(KINDS), autouse=True)
    def copies(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        kind = str(request.param)
        monkeypatch.setattr("tiered_kv_gpu.handlers.copies_for", KINDS[kind])
        return kind


class TestGpuToCpu(BothCopies, GpuToCpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(backend, GpuSpec, CpuSpec)


class TestCpuToGpu(BothCopies, CpuToGpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(backend, CpuSpec, GpuSpec)
