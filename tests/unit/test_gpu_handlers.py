"""gpu <-> cpu: both ways of copying; `test_conformance_gpu` has what every handler owes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gpu_rig import (
    KINDS,
    OK,
    BothWays,
    Rig,
    byte_tensor,
    keys_of,
    random_bytes,
    slots_of,
    strided,
)
from tiered_kv.memory import KVCaches
from tiered_kv.specs import GpuBlock, HopResult


class TestBytes(BothWays):
    def test_both_ways_of_copying_fill_slots_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        for name in KINDS:
            rig = Rig(strided(), [4, 2], monkeypatch, kind=name)
            blocks = [GpuBlock(10, (3, 1, 2, 9)), GpuBlock(11, (0, 15))]
            rig.store(keys_of(2), blocks, slots_of(2))
            seen.append([rig.pool.checksum(slot) for slot in slots_of(2)])
            rig.close()
        assert seen[0] == seen[1]
        assert None not in seen[0]

    @given(data=st.data(), pages=st.lists(st.integers(1, 40), min_size=1, max_size=4))
    def test_any_geometry(self, data: st.DataObject, pages: list[int]) -> None:
        chunk = data.draw(st.integers(1, 5), "chunk")
        count = data.draw(st.integers(0, 3), "blocks")
        name = data.draw(st.sampled_from(sorted(KINDS)), "kind")
        total = 2 * chunk * max(1, count)
        named = {
            str(i): byte_tensor(random_bytes((total, page), i)) for i, page in enumerate(pages)
        }
        with pytest.MonkeyPatch.context() as patch:
            rig = Rig(KVCaches.from_named(named, [list(named)]), [chunk], patch, kind=name)
        ids = data.draw(st.permutations(range(total)), "ids")
        here = [tuple(ids[i * chunk : (i + 1) * chunk]) for i in range(count)]
        there = [tuple(ids[(count + i) * chunk :][:chunk]) for i in range(count)]
        before = rig.cache_bytes()
        stored = rig.store(keys_of(count), [GpuBlock(10, b) for b in here], slots_of(count))
        loaded = rig.load(keys_of(count), slots_of(count), [GpuBlock(10, b) for b in there])
        rig.close()
        assert stored == loaded == HopResult((OK,) * count, count * chunk * sum(pages))
        sources = [i for b in here for i in b]
        targets = [i for b in there for i in b]
        for was, now in zip(before, rig.cache_bytes(), strict=True):
            np.testing.assert_array_equal(now[targets], was[sources])
            rest = np.delete(np.arange(total), targets)
            np.testing.assert_array_equal(now[rest], was[rest])
