"""The host block pool and the description of the engine's caches."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.checksum import BlockChecksum
from tiered_kv.contracts import HostMemory
from tiered_kv.errors import ConfigError, UnsupportedError
from tiered_kv.memory import CacheRef, HostBlockPool, KVCaches
from tiered_kv.specs import SlotRef
from tiered_kv.values import PAGE_BYTES, BlockKey

KEY = BlockKey(b"key")


def fill(pool: HostBlockPool, slot: SlotRef, data: bytes) -> BlockChecksum:
    view = pool.begin(slot)
    assert view is not None
    view[: len(data)] = data
    checksum = BlockChecksum.capture(KEY, 0, view[: len(data)])
    assert pool.bind(slot, checksum)
    return checksum


class TestPool:
    def test_is_host_memory_of_page_aligned_private_slots(self) -> None:
        pool = HostBlockPool(2, 2, 3 * PAGE_BYTES)
        memory: HostMemory = pool
        assert (memory.slot_bytes, pool.slots) == (3 * PAGE_BYTES, 4)
        for number in range(4):
            array = pool.as_array(number)
            assert array.nbytes == 3 * PAGE_BYTES
            assert array.ctypes.data % PAGE_BYTES == 0
            array[:] = number + 1
        assert [int(pool.as_array(i).min()) for i in range(4)] == [1, 2, 3, 4]

    def test_bound_bytes_are_seen_under_their_generation_only(self) -> None:
        pool = HostBlockPool(1, 0, PAGE_BYTES)
        slot = SlotRef(0, 1)
        assert pool.view(slot) is None
        assert pool.checksum(slot) is None
        checksum = fill(pool, slot, b"abc")
        view = pool.view(slot)
        assert view is not None
        assert (bytes(view), view.readonly) == (b"abc", True)
        assert pool.checksum(slot) == checksum
        for other in (SlotRef(0, 0), SlotRef(0, 2)):
            assert pool.view(other) is None
            assert pool.checksum(other) is None

    def test_a_younger_generation_ends_the_older_one(self) -> None:
        pool = HostBlockPool(1, 0, PAGE_BYTES)
        old, new = SlotRef(0, 1), SlotRef(0, 2)
        checksum = fill(pool, old, b"old")
        assert pool.begin(new) is not None
        assert pool.view(old) is None
        assert pool.checksum(old) is None
        assert pool.begin(old) is None
        assert not pool.bind(old, checksum)
        assert pool.checksum(new) is None
        fill(pool, new, b"new")
        assert pool.checksum(new) is not None

    def test_begun_while_held_is_noticed(self) -> None:
        """F52: whoever reads a slot asks again afterwards."""
        pool = HostBlockPool(1, 0, PAGE_BYTES)
        fill(pool, SlotRef(0, 1), b"old")
        view = pool.view(SlotRef(0, 1))
        fill(pool, SlotRef(0, 2), b"new")
        assert view is not None
        assert bytes(view) == b"new"
        assert pool.checksum(SlotRef(0, 1)) is None

    def test_a_generation_is_bound_once(self) -> None:
        pool = HostBlockPool(1, 0, PAGE_BYTES)
        slot = SlotRef(0, 1)
        assert pool.begin(slot) is not None
        assert pool.begin(slot) is not None, "begun again before it was bound"
        checksum = fill(pool, slot, b"abc")
        assert pool.begin(slot) is None
        assert not pool.bind(slot, checksum)
        assert pool.checksum(slot) == checksum

    def test_binding_what_was_never_begun_is_refused(self) -> None:
        pool = HostBlockPool(1, 0, PAGE_BYTES)
        assert not pool.bind(SlotRef(0, 1), BlockChecksum(3, 4))
        assert pool.checksum(SlotRef(0, 1)) is None

    def test_several_slots_at_once_are_as_one_after_the_other(self) -> None:
        pool = HostBlockPool(4, 0, PAGE_BYTES)
        bound = fill(pool, SlotRef(0, 2), b"abc")
        first, young, old = SlotRef(0, 2), SlotRef(1, 1), SlotRef(0, 1)
        begun = pool.begin_all((first, young, old, SlotRef(2, 5)))
        assert [view is not None for view in begun] == [False, True, False, True]
        assert [view.nbytes for view in begun if view is not None] == [PAGE_BYTES] * 2
        checksum = BlockChecksum(7, 4)
        slots = (young, first, young, SlotRef(3, 1), SlotRef(2, 5))
        assert pool.bind_all(slots, [checksum] * 5) == [True, False, False, False, True]
        assert pool.checksums((first, young, old)) == [bound, checksum, None]
        views = pool.views((first, old, young))
        assert [None if v is None else (v.nbytes, v.readonly) for v in views] == [
            (3, True),
            None,
            (7, True),
        ]
        del begun, views
        assert pool.close()
        assert (pool.begin_all((young,)), pool.views((young,))) == ([None], [None])
        assert pool.checksums((young,)) == [None]
        assert pool.bind_all((young,), (checksum,)) == [False]

    def test_of_several_slots_none_is_touched_where_one_is_wrong(self) -> None:
        pool = HostBlockPool(2, 0, PAGE_BYTES)
        good, foreign = SlotRef(0, 1), SlotRef(2, 1)
        with pytest.raises(ValueError, match=r"slot 2 is outside the pool of 2 slots"):
            pool.begin_all((good, foreign))
        assert not pool.bind(good, BlockChecksum(3, 4)), "it was not begun"
        pool.begin_all((good, SlotRef(1, 1)))
        with pytest.raises(ValueError, match="4097 bytes"):
            pool.bind_all((good, SlotRef(1, 1)), (BlockChecksum(3, 4), BlockChecksum(4097, 4)))
        assert pool.checksums((good, SlotRef(1, 1))) == [None, None]

    def test_nonsense_is_refused(self) -> None:
        for args in [(0, 0, 4096), (-1, 2, 4096), (1, -1, 4096), (1, 1, 0), (1, 1, 4097)]:
            with pytest.raises(ValueError, match="slot"):
                HostBlockPool(*args)
        pool = HostBlockPool(1, 1, PAGE_BYTES)
        for slot in (SlotRef(2, 1), SlotRef(-1, 1)):
            for call in (pool.begin, pool.view, pool.checksum):
                with pytest.raises(ValueError, match=r"outside the pool of 2 slots"):
                    call(slot)
        with pytest.raises(ValueError, match="4097 bytes"):
            pool.bind(SlotRef(0, 1), BlockChecksum(PAGE_BYTES + 1, 0))
        with pytest.raises(ValueError, match="lease"):
            pool.lease(-1)
        with pytest.raises(ConfigError, match="capacity of the cpu tier"):
            HostBlockPool(1 << 50, 0, PAGE_BYTES)

    def test_staging_is_leased_and_given_back(self) -> None:
        pool = HostBlockPool(3, 4, PAGE_BYTES)
        assert pool.lease(0) == ()
        first = pool.lease(3)
        assert first is not None
        assert [slot.number for slot in first] == [3, 4, 5]
        assert (pool.leased, pool.free_staging) == (3, 1)
        assert pool.lease(2) is None
        assert pool.lease(1, leave=1) is None
        assert pool.lease(5) is None
        for slot in first:
            fill(pool, slot, b"x")
        pool.give_back(first[:2])
        assert (pool.leased, pool.free_staging) == (1, 3), "a quarantined slot stays out of use"
        assert pool.view(first[0]) is None
        assert pool.checksum(first[0]) is None
        assert pool.begin(first[0]) is None, "a late writer is kept out"
        assert not pool.bind(first[0], BlockChecksum(1, 0))
        assert pool.view(first[2]) is not None
        (unwritten,) = pool.lease(1) or [None]
        assert unwritten is not None
        pool.give_back([unwritten])
        assert pool.begin(unwritten) is None
        again = pool.lease(2)
        assert again is not None
        assert [slot.number for slot in again] == [3, 4]
        assert again[0].generation > first[0].generation
        assert pool.begin(again[0]) is not None
        pool.give_back([*first, *again, SlotRef(0, 1), SlotRef(99, 1)])
        assert (pool.leased, pool.free_staging, pool.stray_returns) == (0, 4, 4)

    def test_threads_never_lease_one_slot_twice(self) -> None:
        pool = HostBlockPool(0, 8, PAGE_BYTES)
        owner: list[int | None] = [None] * 8
        clashes: list[str] = []
        done = [0, 0, 0, 0]
        start = threading.Barrier(4)

        def work(me: int) -> None:
            start.wait()
            for _ in range(500):
                slots = pool.lease(3)
                if slots is None:
                    continue
                for slot in slots:
                    if owner[slot.number] is not None:
                        clashes.append(f"{slot} has two owners")
                    owner[slot.number] = me
                    if pool.begin(slot) is None or not pool.bind(slot, BlockChecksum(1, me)):
                        clashes.append(f"{slot} is not its owner's")
                for slot in slots:
                    known = pool.checksum(slot)
                    if known is None or known.value != me or owner[slot.number] != me:
                        clashes.append(f"{slot} was taken")
                    owner[slot.number] = None
                pool.give_back(slots)
                done[me] += 1

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(f"leases {sum(done)}")
        assert not clashes
        assert sum(done) > 0
        assert (pool.leased, pool.free_staging, pool.stray_returns) == (0, 8, 0)

    def test_close_waits_for_nobody(self) -> None:
        pool = HostBlockPool(1, 1, PAGE_BYTES)
        slot = SlotRef(0, 1)
        fill(pool, slot, b"abc")
        held = pool.view(slot)
        array = pool.as_array(1)
        assert held is not None
        assert pool.close() is False
        assert bytes(held) == b"abc"
        array[:] = 1
        assert pool.view(slot) is None
        assert pool.begin(SlotRef(0, 2)) is None
        assert pool.checksum(slot) is None
        assert not pool.bind(slot, BlockChecksum(1, 0))
        assert pool.lease(1) is None
        with pytest.raises(ValueError, match="closed"):
            pool.as_array(0)
        del held, array
        gc.collect()
        assert pool.close() is True
        assert pool.close() is True


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


class TestCaches:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_dtype_is_seen_as_its_bytes(self, dtype: torch.dtype) -> None:
        cache = torch.arange(6 * 2 * 4 * 8, dtype=torch.int64).remainder(100)
        cache = cache.to(torch.float32).to(dtype).reshape(6, 2, 4, 8)
        caches = KVCaches.from_named({"a": cache}, [["a"]])
        page = 64 * cache.element_size()
        assert caches.groups == ((CacheRef(0, page),),)
        assert caches.num_blocks == 6
        assert caches.block_bytes(0, 3) == 3 * page
        rows = caches.tensors[0]
        assert rows.dtype is torch.int8
        expected = cache.view(torch.uint8).reshape(6, page).numpy()
        np.testing.assert_array_equal(rows.view(torch.uint8).numpy(), expected)
        rows[2] = 7
        assert bool((cache[2].view(torch.uint8) == 7).all()), "it is the same memory"

    def test_rows_further_apart_and_permuted_inside_are_taken(self) -> None:
        whole = torch.arange(5 * 3 * 16, dtype=torch.int32).reshape(5, 3, 16)
        one_layer = whole[:, 1]
        permuted = torch.arange(5 * 12, dtype=torch.int16).reshape(5, 3, 4).permute(0, 2, 1)
        offset = torch.arange(7 * 8, dtype=torch.int8).reshape(7, 8)[2:]
        named = {"layer": one_layer, "permuted": permuted, "offset": offset}
        caches = KVCaches.from_named(named, [["layer"], ["permuted", "offset"]], num_blocks=5)
        assert [t.shape[1] for t in caches.tensors] == [64, 24, 8]
        assert caches.tensors[0].stride() == (192, 1)
        assert caches.block_bytes(1, 2) == 64
        got = caches.tensors[0][3].contiguous().view(torch.int32)
        assert got.tolist() == one_layer[3].tolist()
        in_memory_order = permuted.permute(0, 2, 1)[4].flatten()
        assert caches.tensors[1][4].view(torch.int16).tolist() == in_memory_order.tolist()
        assert caches.tensors[2][0].tolist() == list(range(16, 24))

    def test_a_layer_in_two_groups_is_one_tensor(self) -> None:
        caches = KVCaches.from_named(
            {"a": torch.zeros(2, 4), "b": torch.zeros(2, 4), "unused": torch.zeros(9)},
            [["a", "b"], ["a"]],
        )
        assert len(caches.tensors) == 2
        assert caches.groups == ((CacheRef(0, 16), CacheRef(1, 16)), (CacheRef(0, 16),))

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: torch.zeros(4, 8)[:, ::2], "bytes of one block together"),
            (lambda: torch.zeros(4, 2, 8)[:, :, :4], "bytes of one block together"),
            (lambda: torch.zeros(8, 4).t(), "bytes of one block together"),
            (lambda: torch.zeros(1, 8).expand(4, 8), "overlap"),
            (lambda: torch.zeros(4, 1, 8).expand(4, 3, 8), "bytes of one block together"),
            (lambda: torch.zeros(20).as_strided((4, 8), (4, 1)), "overlap"),
            (lambda: torch.zeros(4), "no dimension of blocks"),
            (lambda: torch.zeros(0, 8), "no dimension of blocks"),
            (lambda: torch.zeros(2, 4, 8), "2 entries in dimension 0; expected 4"),
            (lambda: torch.zeros(4, 8).to_sparse(), "layout"),
        ],
    )
    def test_layouts_that_are_not_understood_are_refused(
        self, make: Callable[[], torch.Tensor], reason: str
    ) -> None:
        """F48."""
        with pytest.raises(UnsupportedError, match=reason) as caught:
            KVCaches.from_named({"layer.3": make()}, [["layer.3"]], num_blocks=4)
        assert "layer.3" in str(caught.value)

    @pytest.mark.parametrize(
        ("tensors", "refs", "reason"),
        [
            ([], [CacheRef(0, 8)], "no KV cache"),
            ([torch.zeros(4, 8)], [CacheRef(0, 8)], "dtype"),
            ([torch.zeros(4, 2, 8, dtype=torch.int8)], [CacheRef(0, 8)], "shape"),
            ([torch.zeros(8, 4, dtype=torch.int8).t()], [CacheRef(0, 8)], "contiguous"),
            ([torch.zeros(1, 8, dtype=torch.int8).expand(4, 8)], [CacheRef(0, 8)], "overlap"),
            (
                [torch.zeros(4, 8, dtype=torch.int8), torch.zeros(5, 8, dtype=torch.int8)],
                [CacheRef(0, 8)],
                "tensor 1 has 5 blocks",
            ),
            (
                [
                    torch.zeros(4, 8, dtype=torch.int8),
                    torch.zeros(4, 8, dtype=torch.int8, device="meta"),
                ],
                [CacheRef(0, 8)],
                "is on meta",
            ),
            ([torch.zeros(4, 8, dtype=torch.int8)], [], "no KV cache tensor"),
            ([torch.zeros(4, 8, dtype=torch.int8)], [CacheRef(1, 8)], "tensor 1 of 1"),
            ([torch.zeros(4, 8, dtype=torch.int8)], [CacheRef(0, 9)], "whose rows have 8"),
            ([torch.zeros(4, 8, dtype=torch.int8)], [CacheRef(0, 0)], "0 bytes"),
        ],
    )
    def test_descriptions_that_do_not_fit_are_refused(
        self, tensors: list[torch.Tensor], refs: list[CacheRef], reason: str
    ) -> None:
        with pytest.raises(UnsupportedError, match=reason):
            KVCaches(tuple(tensors), (tuple(refs),))

    def test_an_unknown_layer_is_named(self) -> None:
        with pytest.raises(UnsupportedError, match=r"group 1 names layer 'b'"):
            KVCaches.from_named({"a": torch.zeros(4, 8)}, [["a"], ["b"]])

    @given(
        shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
        order=st.randoms(use_true_random=False),
        pad=st.integers(0, 5),
    )
    def test_a_block_accepted_has_exactly_the_bytes_of_its_row(
        self, shape: list[int], order: object, pad: int
    ) -> None:
        """Whatever permutation of the inner dimensions: the row's bytes, each once."""
        import random

        assert isinstance(order, random.Random)
        inner = list(range(1, len(shape)))
        order.shuffle(inner)
        size = int(np.prod(shape[1:]))
        memory = torch.arange(shape[0] * (size + pad), dtype=torch.int32)
        base = memory.reshape(shape[0], size + pad)[:, :size]
        physical = base.view(shape[0], *[shape[i] for i in inner])
        back = [0] + [1 + inner.index(i) for i in range(1, len(shape))]
        caches = KVCaches.from_named({"a": physical.permute(back)}, [["a"]])
        for i in range(shape[0]):
            assert caches.tensors[0][i].contiguous().view(torch.int32).tolist() == base[i].tolist()
