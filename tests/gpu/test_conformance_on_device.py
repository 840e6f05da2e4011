"""gpu <-> cpu: our handlers are handlers where the engine's cache is on a real device."""

from __future__ import annotations

import pytest

from tests.gpu.device import DEVICE, need_device
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.testing.conformance.handlers import (
    CpuToGpuConformance,
    GpuToCpuConformance,
    HandlerCase,
)
from tiered_kv_gpu import backend

need_device()


class TestGpuToCpu(GpuToCpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(backend, GpuSpec, CpuSpec, device=DEVICE)


class TestCpuToGpu(CpuToGpuConformance):
    @pytest.fixture
    def case(self) -> HandlerCase:
        return HandlerCase.of(backend, CpuSpec, GpuSpec, device=DEVICE)
