from __future__ import annotations

import pickle  # noqa: TID251 - engines send specs between their processes this way
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HandlerContext, TransferHandler
from tiered_kv.errors import IdentityError, PluginError
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuBlock, GpuSpec, KeySpec, Part, Parts, SlotRef
from tiered_kv.threads import DaemonExecutor
from tiered_kv.values import (
    BlockKey,
    CacheGeometry,
    ChecksumKind,
    Fingerprint,
    GroupGeometry,
    Medium,
    Namespace,
)


class DiskSpec(KeySpec):
    medium = Medium("disk")


class OtherDiskSpec(KeySpec):
    medium = Medium("disk")


def no_handler(context: HandlerContext) -> TransferHandler[CpuSpec, KeySpec]:
    raise AssertionError("not called")


def test_a_taken_pair_names_both_providers() -> None:
    registry = TransferRegistry()
    registry.register(CpuSpec, DiskSpec, no_handler, provider="one")
    with pytest.raises(PluginError, match=r"'one' and 'two'"):
        registry.register(CpuSpec, DiskSpec, no_handler, provider="two")
    registry.register(CpuSpec, DiskSpec, no_handler, provider="two", override=True)
    assert registry.pair(CpuSpec, DiskSpec).provider == "two"
    assert str(registry.pair(CpuSpec, DiskSpec)) == "cpu -> disk (two)"


def test_an_override_holds_whoever_comes_first() -> None:
    registry = TransferRegistry()
    registry.register(CpuSpec, DiskSpec, no_handler, provider="better", override=True)
    registry.register(CpuSpec, DiskSpec, no_handler, provider="one")
    assert registry.pair(CpuSpec, DiskSpec).provider == "better"
    with pytest.raises(PluginError, match="registered by both 'one' and 'two'"):
        registry.register(CpuSpec, DiskSpec, no_handler, provider="two")
    registry.register(CpuSpec, DiskSpec, no_handler, provider="best", override=True)
    assert registry.pair(CpuSpec, DiskSpec).provider == "best"


def test_a_medium_belongs_to_one_spec_class() -> None:
    registry = TransferRegistry()
    registry.register(CpuSpec, DiskSpec, no_handler, provider="one")
    with pytest.raises(PluginError, match="claimed by two spec classes"):
        registry.register(CpuSpec, OtherDiskSpec, no_handler, provider="two")


def test_looking_up_does_not_change_the_registry() -> None:
    registry = TransferRegistry()
    with pytest.raises(KeyError):
        registry.pair(CpuSpec, DiskSpec)
    assert list(registry) == []
    assert (CpuSpec, DiskSpec) not in registry


def test_specs_travel_between_processes_and_can_be_cut() -> None:
    gpu = GpuSpec((GpuBlock(0, (1, 2)), GpuBlock(1, (3,), first=1)))
    cpu = CpuSpec((SlotRef(1, 7), SlotRef(2, 8)))
    disk = DiskSpec("ssd", (BlockKey(b"a"), BlockKey(b"b")))
    parts = Parts((Part(cpu, (0, 2)), Part(disk, (1, 3))))
    for spec in (gpu, cpu, disk, parts):
        assert pickle.loads(pickle.dumps(spec)) == spec
    assert len(parts) == 4
    assert gpu.take([1]) == GpuSpec((gpu.blocks[1],))
    assert cpu.take([1, 0]).slots == (SlotRef(2, 8), SlotRef(1, 7))
    assert disk.take([]).keys == ()
    assert (gpu.tier, cpu.tier, disk.tier) == ("gpu", "cpu", "ssd")


@given(data=st.binary(min_size=1, max_size=200), position=st.integers(0), bit=st.integers(0, 7))
def test_a_checksum_covers_bytes_key_length_and_rank(data: bytes, position: int, bit: int) -> None:
    key = BlockKey(b"key")
    checksum = BlockChecksum.capture(key, 0, memoryview(data))
    assert checksum.verifies(key, 0, memoryview(data))
    assert not checksum.verifies(BlockKey(b"kex"), 0, memoryview(data))
    assert not checksum.verifies(key, 1, memoryview(data))
    assert not checksum.verifies(key, 0, memoryview(data + b"\0"))
    flipped = bytearray(data)
    flipped[position % len(data)] ^= 1 << bit
    assert not checksum.verifies(key, 0, memoryview(flipped))


def test_an_unresolved_field_has_no_fingerprint() -> None:
    with pytest.raises(IdentityError, match="kv_dtype, layout"):
        Fingerprint.of({"kv_dtype": "auto", "layout": None, "model": "m"})


def test_each_field_changes_the_namespace() -> None:
    fields: dict[str, object] = {"model": "m", "dtype": "bf16", "tp": 1}
    base = Fingerprint.of(fields)
    assert Namespace(base).id == Namespace(Fingerprint.of(dict(reversed(fields.items())))).id
    for name in fields:
        other = Fingerprint.of(fields | {name: "other"})
        assert base.differences(other) == (name,)
        assert Namespace(other).id != Namespace(base).id
    assert Namespace(base, epoch=b"1").id != Namespace(base).id
    assert len(Namespace(base).id) == 8


def test_slots_are_whole_pages() -> None:
    groups = (GroupGeometry(0, 4097, 1, 16), GroupGeometry(1, 100, 1, 16))
    assert CacheGeometry(groups, 0, 1).slot_bytes == 8192


def test_a_hung_call_does_not_keep_others_from_running() -> None:
    executor = DaemonExecutor(2, "test")
    hang = threading.Event()
    hung = executor.submit(hang.wait)
    assert [executor.submit(pow, 2, n).result(timeout=10) for n in range(5)] == [1, 2, 4, 8, 16]
    assert not hung.done()
    executor.shutdown(wait=False)
    assert not executor.join(timeout=0.01)
    hang.set()
    assert executor.join(timeout=10)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(pow, 1, 1)


def test_calls_that_have_not_begun_can_be_dropped() -> None:
    executor = DaemonExecutor(1, "test")
    begun, hang = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        hang.wait()

    running = executor.submit(block)
    waiting = executor.submit(pow, 1, 1)
    assert begun.wait(timeout=10)
    executor.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    hang.set()
    assert executor.join(timeout=10)
    assert running.result() is None


def test_a_call_that_raises_hands_its_error_on() -> None:
    executor = DaemonExecutor(1, "test")
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 // 0).result(timeout=10)
    assert executor.submit(pow, 1, 1).result(timeout=10) == 1
    executor.shutdown()


@pytest.mark.parametrize("kind", list(ChecksumKind))
@given(data=st.binary(min_size=1, max_size=200), bit=st.integers(min_value=0))
def test_every_kind_of_checksum_finds_every_flipped_bit(
    kind: ChecksumKind, data: bytes, bit: int
) -> None:
    key = BlockKey(b"key")
    checksum = BlockChecksum.capture(key, 0, memoryview(data), kind)
    assert checksum.kind is kind
    assert checksum.verifies(key, 0, memoryview(data))
    assert not checksum.verifies(BlockKey(b"another"), 0, memoryview(data))
    assert not checksum.verifies(key, 1, memoryview(data))
    flipped = bytearray(data)
    bit %= 8 * len(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not checksum.verifies(key, 0, memoryview(flipped))
    assert not checksum.verifies(key, 0, memoryview(data + b"\0"))


@given(data=st.binary(min_size=1, max_size=200))
def test_the_weighted_sum_is_what_its_description_says(data: bytes) -> None:
    state, total = 0, 0
    for start in range(0, len(data), 8):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        weight = (mixed ^ mixed >> 31) | 1
        total += weight * int.from_bytes(data[start : start + 8], "little")
    key = BlockKey(b"key")
    expected = BlockChecksum.of_sum(key, 3, len(data), total)
    assert BlockChecksum.capture(key, 3, memoryview(data), ChecksumKind.WSUM) == expected
    signed = (total % 2**64) - 2**64 if total % 2**64 >= 2**63 else total % 2**64
    assert BlockChecksum.of_sum(key, 3, len(data), signed) == expected
