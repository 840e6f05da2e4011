"""Right uses of the registry: type checkers must accept them, and infer exactly this.

Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, assert_type

from tiered_kv.contracts import HandlerContext, HandlerFactory, TransferHandler
from tiered_kv.engine import CpuToStoreHandler, StoreToCpuHandler
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec, HopResult, KeySpec, LoadStoreSpec, TransferSpec
from tiered_kv.values import BlockKey, Medium


@dataclass(frozen=True, slots=True)
class TapeSpec(KeySpec):
    medium: ClassVar[Medium] = Medium("tape")


@dataclass(frozen=True, slots=True)
class DrumSpec(KeySpec):
    medium: ClassVar[Medium] = Medium("drum")


class GpuToTape:
    """What a third party writes for a pair of its own."""

    def __init__(self, context: HandlerContext) -> None:
        self._tier = context.tier

    async def transfer(self, spec: TransferSpec[GpuSpec, TapeSpec]) -> HopResult:
        assert_type(spec.src, GpuSpec)
        assert_type(spec.dst, TapeSpec)
        assert_type(spec.dst.take([0]), TapeSpec)
        return HopResult((), 0)

    def modes(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class AnythingToCpu:
    """Reads any source, so it serves for every one of them."""

    def __init__(self, context: HandlerContext) -> None:
        self._tier = context.tier

    async def transfer(self, spec: TransferSpec[LoadStoreSpec, CpuSpec]) -> HopResult:
        return HopResult((), 0)

    def modes(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


def make_gpu_to_tape(context: HandlerContext) -> TransferHandler[GpuSpec, TapeSpec]:
    return GpuToTape(context)


def registering(registry: TransferRegistry) -> None:
    registry.register(GpuSpec, TapeSpec, GpuToTape, provider="tape")
    registry.register(GpuSpec, TapeSpec, make_gpu_to_tape, provider="tape", override=True)
    registry.register(TapeSpec, CpuSpec, AnythingToCpu, provider="tape")
    registry.register(DrumSpec, CpuSpec, AnythingToCpu, provider="drum")
    registry.register(CpuSpec, TapeSpec, CpuToStoreHandler, provider="tape")
    registry.register(TapeSpec, CpuSpec, StoreToCpuHandler, provider="tape")
    factory: HandlerFactory[GpuSpec, TapeSpec] = GpuToTape
    registry.register(GpuSpec, TapeSpec, factory, provider="tape", missing=lambda settings: None)


async def asking(registry: TransferRegistry, context: HandlerContext, key: BlockKey) -> None:
    store = registry.handler(GpuSpec, CpuSpec, context)
    assert_type(store, TransferHandler[GpuSpec, CpuSpec])
    load = registry.handler(TapeSpec, GpuSpec, context)
    assert_type(load, TransferHandler[TapeSpec, GpuSpec])

    gpu, cpu, tape = GpuSpec(()), CpuSpec(()), TapeSpec("t", (key,))
    hop = TransferSpec(gpu, cpu, (key,))
    assert_type(hop, TransferSpec[GpuSpec, CpuSpec])
    assert_type(await store.transfer(hop), HopResult)
    await load.transfer(TransferSpec(tape, gpu, (key,)))


def variance(anything: TransferHandler[KeySpec, CpuSpec]) -> TransferHandler[TapeSpec, CpuSpec]:
    """Whoever can read every store can read a tape."""
    return anything
