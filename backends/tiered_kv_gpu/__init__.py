"""gpu <-> cpu: between the engine's KV cache and the rank's host block pool.

Works on CUDA devices (ROCm included), and where the engine's cache is in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_kv.contracts import API_VERSION, Backend, HandlerContext, TransferHandler
from tiered_kv.specs import CpuSpec, GpuSpec
from tiered_kv.values import GPU

if TYPE_CHECKING:
    from tiered_kv.registry import TransferRegistry

__all__ = ["backend"]


def _store(context: HandlerContext) -> TransferHandler[GpuSpec, CpuSpec]:
    from tiered_kv_gpu.handlers import GpuToCpuHandler  # noqa: PLC0415 - imports torch

    return GpuToCpuHandler(context)


def _load(context: HandlerContext) -> TransferHandler[CpuSpec, GpuSpec]:
    from tiered_kv_gpu.handlers import CpuToGpuHandler  # noqa: PLC0415 - imports torch

    return CpuToGpuHandler(context)


def _register(registry: TransferRegistry) -> None:
    registry.register(GpuSpec, CpuSpec, _store, provider=backend.name)
    registry.register(CpuSpec, GpuSpec, _load, provider=backend.name)


backend = Backend(
    name="gpu",
    medium=GPU,
    api_version=API_VERSION,
    description="moves blocks between the engine's KV cache and host memory",
    register=_register,
    requires=(("torch", "pip install torch"), ("numpy", "pip install numpy")),
)
