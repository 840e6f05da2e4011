"""Wrong uses of the registry: type checkers must reject each line that ends in `# E`, no other.

Nothing here runs, and the gates leave this file out.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.typing.right_uses import DrumSpec, GpuToTape, TapeSpec, make_gpu_to_tape
from tiered_kv.contracts import HandlerContext, TransferHandler
from tiered_kv.engine import CpuToStoreHandler, StoreToCpuHandler
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec, HopResult, KeySpec, LoadStoreSpec, TransferSpec
from tiered_kv.values import BlockKey


class Blocking:
    """Forgets that handlers are asynchronous."""

    def __init__(self, context: HandlerContext) -> None:
        self._tier = context.tier

    def transfer(self, spec: TransferSpec[GpuSpec, TapeSpec]) -> HopResult:
        return HopResult((), 0)

    def modes(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class WithoutModes:
    """Does not say what is in effect."""

    def __init__(self, context: HandlerContext) -> None:
        self._tier = context.tier

    async def transfer(self, spec: TransferSpec[GpuSpec, TapeSpec]) -> HopResult:
        return HopResult((), 0)

    def close(self) -> None: ...


def wants_more(context: HandlerContext, path: str) -> TransferHandler[GpuSpec, TapeSpec]:
    return GpuToTape(context)


def registering(registry: TransferRegistry, made: GpuToTape) -> None:
    registry.register(TapeSpec, GpuSpec, GpuToTape, provider="tape")  # E
    registry.register(GpuSpec, DrumSpec, GpuToTape, provider="tape")  # E
    registry.register(CpuSpec, TapeSpec, GpuToTape, provider="tape")  # E
    registry.register(GpuSpec, CpuSpec, make_gpu_to_tape, provider="tape")  # E
    registry.register(TapeSpec, CpuSpec, CpuToStoreHandler, provider="tape")  # E
    registry.register(CpuSpec, TapeSpec, StoreToCpuHandler, provider="tape")  # E
    registry.register(GpuSpec, TapeSpec, Blocking, provider="tape")  # E
    registry.register(GpuSpec, TapeSpec, WithoutModes, provider="tape")  # E
    registry.register(GpuSpec, TapeSpec, wants_more, provider="tape")  # E
    registry.register(GpuSpec, TapeSpec, made, provider="tape")  # E
    registry.register("gpu", TapeSpec, GpuToTape, provider="tape")  # E
    registry.register(GpuSpec(()), TapeSpec, GpuToTape, provider="tape")  # E
    registry.register(GpuSpec, TapeSpec, GpuToTape)  # E
    registry.register(GpuSpec, int, GpuToTape, provider="tape")  # E


async def asking(registry: TransferRegistry, context: HandlerContext, key: BlockKey) -> None:
    gpu, cpu, tape, drum = GpuSpec(()), CpuSpec(()), TapeSpec("t", (key,)), DrumSpec("d", (key,))
    store = registry.handler(GpuSpec, TapeSpec, context)
    wrong: TransferHandler[TapeSpec, GpuSpec] = store  # E
    await store.transfer(TransferSpec(gpu, cpu, (key,)))  # E
    await store.transfer(TransferSpec(tape, gpu, (key,)))  # E
    await store.transfer(TransferSpec(gpu, drum, (key,)))  # E
    await store.transfer(gpu)  # E
    registry.handler(GpuSpec, "tape", context)  # E
    registry.handler(int, TapeSpec, context)  # E
    del wrong


def variance(one: TransferHandler[TapeSpec, CpuSpec]) -> TransferHandler[KeySpec, CpuSpec]:
    """Whoever can read a tape cannot read every store."""
    return one  # E


def source(spec: TransferSpec[LoadStoreSpec, CpuSpec]) -> TransferSpec[TapeSpec, CpuSpec]:
    """What comes from anywhere does not come from a tape."""
    return spec  # E
