"""gpu <-> cpu: between the engine's KV cache and the rank's host block pool.

Works for any device that torch knows, also where the engine's cache is in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.contracts import API_VERSION, Backend
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.values import GPU

if TYPE_CHECKING:
    from tiered_kv.registry import TransferRegistry

__all__ = ["backend"]


def _register(registry: TransferRegistry) -> None:
    from tiered_kv_gpu.handlers import (  # noqa: PLC0415 - torch is imported when it is needed
        CpuToGpuHandler,
        GpuToCpuHandler,
    )

    registry.register(GpuSpec, CpuSpec, GpuToCpuHandler, provider=backend.name)
    registry.register(CpuSpec, GpuSpec, CpuToGpuHandler, provider=backend.name)


backend = Backend(
    name="gpu",
    medium=GPU,
    api_version=API_VERSION,
    description="moves blocks between the engine's KV cache and host memory",
    register=_register,
    requires=(("torch", "pip install torch"), ("numpy", "pip install numpy")),
)
