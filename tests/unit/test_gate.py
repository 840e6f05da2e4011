"""Load or recompute: the cut of a prefix, as a pure computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.placement import Cut, CutReason, GroupPrefix, TierLoad, choose_cut
from tiered_kv.stats import LoadRate
from tiered_kv.values import GroupGeometry

BLOCK = 1000
"""Bytes of a block, which holds 10 tokens."""

NAMES: tuple[str, ...] = ("host", "ssd", "far")


def group(index: int = 0, tokens: int = 10, size: int = BLOCK) -> GroupGeometry:
    return GroupGeometry(index, size, 1, tokens)


def full(sources: Sequence[str | None]) -> GroupPrefix:
    return GroupPrefix(group(), tuple(sources))


def tier(speed: float, latency: float = 0.0, waiting: int = 0) -> TierLoad:
    return TierLoad(LoadRate(speed, latency), waiting)


def seconds(cut: Cut) -> float:
    return cut.load_seconds + (cut.compute_seconds or 0.0)


# One tier after the other


def test_a_fast_tier_is_loaded_whole() -> None:
    cut = choose_cut([full(["ssd"] * 8)], 0, 100, {"ssd": tier(1e6)}, prefill=1000.0)
    assert (cut.at, cut.hit, cut.reason) == (80, 80, None)
    assert cut.load_seconds == pytest.approx(8e-3)
    assert cut.compute_seconds == pytest.approx(20e-3)


def test_a_tier_slower_than_computing_is_not_loaded() -> None:
    # 10 tokens take 10 ms to compute, and 20 ms to load.
    cut = choose_cut([full(["ssd"] * 8)], 0, 100, {"ssd": tier(50e3)}, prefill=1000.0)
    assert (cut.at, cut.hit, cut.reason) == (0, 80, CutReason.SLOWER)
    assert cut.load_seconds == 0.0
    assert cut.compute_seconds == pytest.approx(0.1)
    assert cut.whole_seconds == pytest.approx(0.16)


def test_a_prefix_is_cut_where_the_slow_tier_begins() -> None:
    tiers = {"host": tier(1e6), "ssd": tier(50e3)}
    cut = choose_cut([full(["host"] * 4 + ["ssd"] * 4)], 0, 80, tiers, prefill=1000.0)
    assert (cut.at, cut.hit, cut.reason) == (40, 80, CutReason.SLOWER)


def test_a_slow_tier_is_used_beside_one_that_takes_as_long_anyway() -> None:
    # The host's share takes 40 ms, and meanwhile the slow tier brings two blocks for nothing.
    tiers = {"host": tier(100e3), "ssd": tier(50e3)}
    cut = choose_cut([full(["host"] * 4 + ["ssd"] * 4)], 0, 80, tiers, prefill=1000.0)
    assert cut.at == 60
    assert cut.load_seconds == pytest.approx(0.04)


def test_a_latency_is_worth_it_for_many_blocks_only() -> None:
    tiers = {"ssd": tier(1e9, latency=0.05)}
    few, many = (
        choose_cut([full(["ssd"] * count)], 0, 10 * count, tiers, prefill=1000.0)
        for count in (4, 6)
    )
    assert (few.at, many.at) == (0, 60)


def test_what_a_tier_brings_already_comes_first() -> None:
    idle, busy = (
        choose_cut([full(["ssd"] * 8)], 0, 80, {"ssd": load}, prefill=1000.0)
        for load in (tier(200e3), tier(200e3, waiting=20 * BLOCK))
    )
    assert (idle.at, busy.at) == (80, 0)


def test_what_the_engine_holds_itself_is_not_counted() -> None:
    # It holds 25 tokens: the block that it has half of would be loaded whole.
    cut = choose_cut([full(["ssd"] * 4)], 25, 100, {"ssd": tier(1e6)}, prefill=1000.0)
    assert (cut.at, cut.hit) == (60, 60)
    assert cut.load_seconds == pytest.approx(4e-3)
    assert cut.compute_seconds == pytest.approx(0.04)


def test_only_what_lies_before_the_first_missing_block_counts() -> None:
    sources = ["ssd", "ssd", None, "ssd"]
    cut = choose_cut([full(sources)], 0, 40, {"ssd": tier(1e6)}, prefill=1000.0)
    assert (cut.at, cut.hit) == (20, 20)


@pytest.mark.parametrize("sources", [(), (None,), (None, "ssd")])
def test_nothing_found_is_nothing_to_load(sources: tuple[str | None, ...]) -> None:
    cut = choose_cut([full(sources)], 0, 40, {"ssd": tier(1e6)}, prefill=1000.0)
    assert (cut.at, cut.hit, cut.load_seconds, cut.reason) == (0, 0, 0.0, None)


# What is not known


def test_a_tier_that_was_not_measured_is_used() -> None:
    cut = choose_cut([full(["new"] * 8)], 0, 100, {"new": TierLoad(None)}, prefill=1000.0)
    assert (cut.at, cut.reason) == (80, None)


def test_all_is_loaded_that_comes_in_time_while_the_prefill_rate_is_not_known() -> None:
    tiers = {"ssd": tier(50e3)}
    whole = choose_cut([full(["ssd"] * 8)], 0, 100, tiers, None, longest=1.0)
    assert (whole.at, whole.reason, whole.compute_seconds) == (80, None, None)
    part = choose_cut([full(["ssd"] * 8)], 0, 100, tiers, None, longest=0.1)
    assert (part.at, part.hit, part.reason) == (50, 80, CutReason.DEADLINE)
    assert part.load_seconds <= 0.1


def test_no_load_is_chosen_that_would_be_given_up() -> None:
    cut = choose_cut([full(["ssd"] * 8)], 0, 80, {"ssd": tier(20e3)}, 100.0, longest=0.2)
    assert (cut.at, cut.reason) == (40, CutReason.DEADLINE)


# Several KV groups


def test_of_a_sliding_window_only_its_blocks_are_loaded() -> None:
    groups = [full(["ssd"] * 8), GroupPrefix(group(1), ("ssd",) * 8, window=20)]
    cut = choose_cut(groups, 0, 80, {"ssd": tier(1e6)}, prefill=100.0)
    assert cut.at == 80
    assert cut.load_seconds == pytest.approx(10e-3)


def test_a_position_that_a_group_cannot_go_on_from_is_never_chosen() -> None:
    # The window's blocks are stored for the end alone.
    sparse = GroupPrefix(group(1), (None,) * 6 + ("ssd",) * 2, window=20)
    tiers = {"ssd": tier(150e3)}
    alone = choose_cut([full(["ssd"] * 8)], 0, 80, tiers, prefill=1000.0)
    both = choose_cut([full(["ssd"] * 8), sparse], 0, 80, tiers, prefill=1000.0)
    slow = choose_cut([full(["ssd"] * 8), sparse], 0, 80, {"ssd": tier(90e3)}, prefill=1000.0)
    assert (alone.at, both.at, slow.at) == (80, 80, 0)


def test_groups_of_different_blocks_are_cut_where_all_have_one() -> None:
    small = GroupPrefix(group(), ("host",) * 5 + ("far",) * 7)
    large = GroupPrefix(group(1, tokens=40), ("host",) * 3)
    cut = choose_cut([small, large], 0, 120, {"host": tier(1e7), "far": tier(1e3)}, 1000.0)
    assert cut.at == 40
    # The whole hit may end elsewhere, where the engine takes a part of the larger block.
    whole = choose_cut([small, large], 0, 115, {"host": tier(1e7), "far": tier(1e6)}, 1000.0)
    assert (whole.at, whole.hit, whole.reason) == (115, 115, None)


# Whatever the figures

RATES = st.floats(1e2, 1e9)
TIERS = st.fixed_dictionaries(
    {
        name: st.builds(
            TierLoad,
            st.none() | st.builds(LoadRate, RATES, st.floats(0.0, 1.0)),
            st.integers(0, 100 * BLOCK),
        )
        for name in NAMES
    }
)
SOURCES = st.lists(st.sampled_from((*NAMES, *NAMES, None)), max_size=600)
COMPUTED = st.integers(0, 30)


def predicted(
    prefixes: Sequence[GroupPrefix],
    computed: int,
    at: int,
    tiers: dict[str, TierLoad],
    end: int,
    prefill: float,
) -> float:
    """Computed another way: block by block."""
    [prefix] = prefixes
    sizes: dict[str, int] = dict.fromkeys(NAMES, 0)
    first = computed // 10
    for source in prefix.sources[: -(-at // 10) - first] if at > computed else ():
        assert source is not None
        sizes[source] += BLOCK
    load = max(tiers[name].seconds(size) for name, size in sizes.items())
    return load + (end - at) / prefill


@given(SOURCES, COMPUTED, st.integers(0, 50), TIERS, RATES)
def test_never_worse_than_loading_nothing_or_everything(
    sources: list[str | None],
    computed: int,
    more: int,
    tiers: dict[str, TierLoad],
    prefill: float,
) -> None:
    end = (computed // 10 + len(sources)) * 10 + more
    end = max(end, computed)
    prefixes = [full(sources)]
    cut = choose_cut(prefixes, computed, end, tiers, prefill)
    assert computed <= cut.at <= cut.hit <= end
    mine = predicted(prefixes, computed, cut.at, tiers, end, prefill)
    assert seconds(cut) == pytest.approx(mine)
    for other in (computed, cut.hit):
        assert mine <= predicted(prefixes, computed, other, tiers, end, prefill) * (1 + 1e-9)
    assert (cut.reason is None) == (cut.at == cut.hit)


@given(SOURCES, COMPUTED, TIERS, RATES, st.floats(1.0, 1e3))
def test_the_faster_the_engine_the_less_is_loaded(
    sources: list[str | None],
    computed: int,
    tiers: dict[str, TierLoad],
    prefill: float,
    times: float,
) -> None:
    end = computed + len(sources) * 10
    slow, fast = (
        choose_cut([full(sources)], computed, end, tiers, rate)
        for rate in (prefill, prefill * times)
    )
    assert fast.at <= slow.at
    assert seconds(fast) <= seconds(slow) * (1 + 1e-9)


@given(st.integers(0, 600), COMPUTED, RATES, st.floats(0, 1), RATES, st.floats(1.0, 1e3))
def test_the_faster_a_tier_the_more_of_it_is_loaded(
    blocks: int, computed: int, speed: float, latency: float, prefill: float, times: float
) -> None:
    end = computed + blocks * 10
    slow, fast = (
        choose_cut([full(["ssd"] * blocks)], computed, end, {"ssd": tier(rate, latency)}, prefill)
        for rate in (speed, speed * times)
    )
    assert fast.at >= slow.at
    assert seconds(fast) <= seconds(slow) * (1 + 1e-9)


@given(SOURCES, TIERS, RATES, st.sampled_from(NAMES), st.floats(1.0, 1e3))
def test_a_faster_tier_never_makes_it_slower(
    sources: list[str | None],
    tiers: dict[str, TierLoad],
    prefill: float,
    which: str,
    times: float,
) -> None:
    rate = tiers[which].rate
    if rate is None:
        return
    quicker = tiers | {
        which: replace(
            tiers[which], rate=LoadRate(rate.bytes_per_second * times, rate.latency_seconds)
        )
    }
    end = len(sources) * 10
    before, after = (
        choose_cut([full(sources)], 0, end, each, prefill) for each in (tiers, quicker)
    )
    assert seconds(after) <= seconds(before) * (1 + 1e-9)


@given(SOURCES, TIERS, st.none() | RATES, st.floats(0.0, 2.0))
def test_no_load_is_longer_than_allowed(
    sources: list[str | None], tiers: dict[str, TierLoad], prefill: float | None, longest: float
) -> None:
    cut = choose_cut([full(sources)], 0, len(sources) * 10, tiers, prefill, longest)
    assert cut.load_seconds <= longest
    assert cut.load_seconds <= cut.whole_seconds
