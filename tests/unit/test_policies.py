"""Eviction policies: each alone, all in the catalog, against LRU on made workloads, as plug-ins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.contracts import API_VERSION, EvictionPolicy, Policy, PolicyContext, Recency
from tiered_kv.errors import ConfigError, PluginError
from tiered_kv.placement import (
    BUILT_IN,
    AgedFrequency,
    HostCatalog,
    LruPolicy,
    Policies,
    Replay,
    ReplayTier,
    SlotState,
    TracedRequest,
)
from tiered_kv.placement.prefix import PrefixPolicy
from tiered_kv.values import BlockKey

NAMES = tuple(BUILT_IN)
TOKENS = 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(name: str, capacity: int) -> EvictionPolicy[BlockKey]:
    return BUILT_IN[name].make(PolicyContext(capacity))


def prefix(path: Sequence[int]) -> list[BlockKey]:
    """Keys of a path in a tree: equal ones are equal whole prefixes."""
    return [BlockKey(bytes(path[: end + 1])) for end in range(len(path))]


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=60)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_are_usable_prefixes(name: str) -> None:
    counts = {"evicted": 0, "refused": 0, "usable": 0, "passed over": 0}

    @settings(max_examples=60, deadline=None)
    @given(PATHS, st.integers(1, 9), st.randoms(use_true_random=False))
    def run(paths: list[list[int]], slots: int, chance: random.Random) -> None:
        clock = Clock()
        host = HostCatalog(slots, made(name, slots), clock=clock)
        for path in paths:
            clock.now += chance.choice([0.0, 1.0, 40.0, 400.0])
            keys = prefix(path)
            host.wanted(keys)
            held = [key for key in keys if host.lookup(key) is SlotState.READY]
            pins = host.pin(chance.sample(held, len(held) // 2))
            counts["passed over"] += len(pins)
            forced = None if chance.random() < 0.3 else ()
            parents = dict(zip(keys[1:], keys[:-1], strict=True))
            known = sum(1 for _ in takewhile(lambda key: host.lookup(key) is not None, keys))
            offered = keys[chance.randrange(known + 1) :]  # all that is missing, and some before it
            given_ = host.allocate(offered, 1, parents=parents, forced=forced)
            stored = list(given_.slots.values())
            host.stored(stored)
            for slot in stored:
                host.release(slot, 0)
            host.unpin(pins)
            if chance.random() < 0.1:
                host.forget(chance.sample(keys, 1))
            counts["evicted"] += len(given_.evicted)
            counts["refused"] += len(keys) - len(held) - len(stored)
            here = [key for key in all_prefixes(paths) if host.lookup(key) is SlotState.READY]
            assert len(here) == host.resident <= slots
            usable = [key for key in here if all(host.lookup(k) for k in prefix(list(key)))]
            assert usable == here
            counts["usable"] += len(usable)
            assert host.audit() == ()

    run()
    print(name, counts)
    assert min(counts.values()) > 0


def all_prefixes(paths: list[list[int]]) -> list[BlockKey]:
    return list(dict.fromkeys(key for path in paths for key in prefix(path)))


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_a_victim_once_and_none_is_lost(name: str) -> None:
    policy = made(name, 50)
    keys = [BlockKey(f"{i}".encode()) for i in range(40)]
    for start in range(0, 40, 4):
        policy.wanted(keys[start : start + 4], float(start))
        policy.add(keys[start : start + 4])
    for start in (8, 20):
        policy.wanted(keys[start : start + 2], 100.0 + start)
    kept = set(keys[::7])
    for key in policy.victims():
        if key not in kept:
            policy.remove(key)
    assert set(policy.victims()) == kept
    assert len(policy) == len(kept)
    policy.remove(BlockKey(b"unknown"))
    for key in list(kept):
        policy.remove(key)
    assert len(policy) == 0
    assert list(policy.victims()) == []


# Against LRU


def scan() -> Iterator[tuple[int, ...]]:
    """A few prefixes that are used again, in a stream of such as never are."""
    chance = random.Random(1)
    for number in range(6_000):
        if number % 3 == 0:
            root = 10 * chance.randrange(12)
            yield tuple(range(root, root + 8))
        else:
            yield tuple(range(1_000 + 10 * number, 1_008 + 10 * number))


def loop() -> Iterator[tuple[int, ...]]:
    """Always the same prefixes, one after the other; more than there is room for."""
    for number in range(6_000):
        root = 10 * (number % 60)
        yield tuple(range(root, root + 6))


def zipf() -> Iterator[tuple[int, ...]]:
    """Prefixes by Zipf's law, which branch at their ends."""
    chance = random.Random(2)
    roots = range(500)
    weights = [1 / (rank + 1) for rank in roots]
    for root in chance.choices(roots, weights, k=8_000):
        branch = chance.randrange(3)
        yield (*range(100 * root, 100 * root + 4), 100 * root + 10 + branch)


def hit_rate(name: str, capacity: int, requests: Iterator[tuple[int, ...]]) -> float:
    """Percent of the tokens of the last half, counted by the longest prefix."""
    replay = Replay([ReplayTier("host", capacity, name)], block_tokens=TOKENS)
    rows = list(requests)
    hit = total = 0
    for number, keys in enumerate(rows):
        request = TracedRequest(number * 0.5, keys, TOKENS * len(keys), 0)
        found = replay.request(request)["host"]
        if number >= len(rows) // 2:
            hit += found
            total += request.tokens
    return 100 * hit / total


@pytest.mark.parametrize("capacity", [50, 200, 800])
@pytest.mark.parametrize("workload", [scan, loop, zipf])
def test_the_default_is_not_worse_than_lru(
    workload: Callable[[], Iterator[tuple[int, ...]]], capacity: int
) -> None:
    ours, lru = (hit_rate(name, capacity, workload()) for name in ("prefix", "lru"))
    print(f"{workload.__name__} at {capacity} blocks: prefix {ours:.2f}%, lru {lru:.2f}%")
    assert ours >= lru - 0.3
    assert ours > 0 or workload is loop, "that repeats sooner than it learns"


# Counts by hand


@pytest.mark.parametrize("name", NAMES)
def test_what_is_needed_is_not_looked_at_for_each_block_that_goes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that grow a block at a time: nearly all blocks are needed by one behind them."""
    policy = made(name, 1_000)
    given = 0
    victims = policy.victims

    def counted() -> Iterator[BlockKey]:
        nonlocal given
        for key in victims():
            given += 1
            yield key

    monkeypatch.setattr(policy, "victims", counted)
    clock = Clock()
    catalog = HostCatalog(1_000, policy, clock=clock)
    evicted = 0
    for length in range(100):
        for answer in range(40):
            clock.now += 0.1
            before, key = (BlockKey(b"%d/%d" % (answer, n)) for n in (length - 1, length))
            catalog.wanted([key])
            slots = catalog.allocate([key], 1, parents={key: before if length else None})
            catalog.stored([*slots.slots.values()])
            for slot in slots.slots.values():
                catalog.release(slot, 0)
            evicted += len(slots.evicted)
    print(f"{evicted} blocks evicted, {given} given as victims")
    assert evicted > 1_000
    assert given < 50 * evicted
    assert catalog.audit() == ()


def test_a_replay_counts_tokens_of_the_longest_prefix_by_tier() -> None:
    tiers = [ReplayTier("host", 2, "lru"), ReplayTier("ssd", 10, "lru", store=True)]
    replay = Replay(tiers, block_tokens=10, block_bytes=100)
    assert replay.request(TracedRequest(0.0, (1, 2, 3), 25, 0)) == {"host": 0, "ssd": 0}
    found = replay.request(TracedRequest(1.0, (1, 2, 3), 25, 0))
    assert found == {"host": 20, "ssd": 5}
    counts = replay.counts
    assert (counts["host"].resident, counts["ssd"].resident) == (2, 3)
    assert counts["ssd"].written_bytes == 300
    assert replay.request(TracedRequest(2.0, (7, 2), 15, 0)) == {"host": 0, "ssd": 0}


def test_an_aged_score_is_a_count_of_uses_as_a_time() -> None:
    scoring = AgedFrequency(10.0)
    second = 10**9
    once = scoring.score(None, 100 * second)
    assert once == 100 * second
    twice = scoring.score(once, 100 * second)
    assert twice == 110 * second, "two uses at once are one a half-life later"
    assert scoring.score(twice, 110 * second) == 120 * second
    old = scoring.score(0, 10_000 * second)
    assert old == 10_000 * second, "uses of long ago count nothing"
    with pytest.raises(ValueError, match="half-life"):
        AgedFrequency(0.0)


@given(st.integers(0, 2**62), st.integers(1, 2**45), st.integers(0, 2**62))
def test_scores_keep_their_order_and_never_fall(before: int, more: int, now: int) -> None:
    for scoring in (Recency(), AgedFrequency(600.0)):
        low, high = scoring.score(before, now), scoring.score(before + more, now + 4)
        assert low < high
        assert low >= max(before, now)


def test_a_conversation_that_comes_back_stays_before_what_never_does() -> None:
    policy = made("prefix", 20)
    now = 0.0
    chats = [[BlockKey(f"chat{n}-{i}".encode()) for i in range(4)] for n in range(3)]
    for turn in range(60):
        for chat in chats:
            now += 1.0
            policy.wanted(chat, now)
            policy.add(chat)
        for n in range(3):
            now += 1.0
            once = [BlockKey(f"once{turn}-{n}-{i}".encode()) for i in range(4)]
            policy.wanted(once, now)
            policy.add(once)
            if turn > 5:
                for key in policy.victims():
                    if len(policy) <= 20:
                        break
                    policy.remove(key)
    left = set(policy.victims())
    assert left >= {key for chat in chats for key in chat}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_kv.placement.prefix.LEAST_MEMORY", 100)
    policy = made("prefix", 10)
    for number in range(2_000):
        keys = [BlockKey(f"{number}-{i}".encode()) for i in range(3)]
        policy.wanted([BlockKey(b"hot"), *keys], float(number))
        if number % 50 == 0:
            policy.add(keys)
    for key in policy.victims():
        if len(policy) > 10:
            policy.remove(key)
    remembered = vars(policy)
    assert len(remembered["_runs"]) <= 100 + len(policy)
    assert len(remembered["_history"]) <= 2 * len(remembered["_runs"]) + 64


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_that_is_over_holds_no_keys(stored: bool) -> None:
    """The same blocks are used again and again: runs are many, blocks are not."""
    policy = PrefixPolicy[BlockKey](1_000)
    keys = [BlockKey(f"{i}".encode()) for i in range(200)]
    most = runs = 0
    for turn in range(300):
        policy.wanted(keys, 0.01 * turn)
        if stored and not len(policy):
            policy.add(keys)
            policy.needed(keys[-1], True)
        remembered = vars(policy)
        held = [*remembered["_history"], *remembered["_held"]]
        held += [run for aging in remembered["_aging"] for run in aging]
        held += [run for place in remembered["_places"].values() for run in place]
        every = set(held)
        runs = max(runs, len(every))
        most = max(most, sum(len(run.keys) + len(run.here) for run in every))
    print(f"{runs} runs at most, which hold {most} keys of {len(keys)}")
    assert runs > 200
    assert most <= 2 * len(keys)
    assert set(policy.victims()) == (set(keys) if stored else set())


# Plug-ins


def lifo() -> Policy:
    return Policy("lifo", API_VERSION, "for tests", make=lambda context: LruPolicy())


LIFO = lifo()
OLDER = Policy("older", 0, "for tests", make=lambda context: LruPolicy())
NAMED = Policy("other", API_VERSION, "for tests", make=lambda context: LruPolicy())
# The wrong type is what is to be found out when it is loaded.
SHAPELESS = Policy("shapeless", API_VERSION, "for tests", make=LruPolicy)  # type: ignore[arg-type]
HERE = __name__


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, f"{HERE}:{value}", "tiered_kv.policies")


def test_a_policy_of_a_plug_in_is_found() -> None:
    policies = Policies(lambda: [entry("lifo", "LIFO")])
    assert policies.names() == (*BUILT_IN, "lifo")
    assert policies.get("lifo", "here") is LIFO
    with pytest.raises(ConfigError, match=r"here: policy 'lifo' is for the host tier alone"):
        policies.scoring("lifo", None, "here")


@pytest.mark.parametrize(
    ("entries", "name", "message"),
    [
        ([], "lfu", "there is no eviction policy 'lfu'"),
        ([], "lruu", "did you mean 'lru'"),
        (
            [entry("lru", "LIFO")],
            "lru",
            r"claimed by tiered-kv itself and unknown .*; uninstall or rename one of them$",
        ),
        ([entry("lifo", "LIFO"), entry("lifo", "NAMED")], "lifo", "claimed by"),
        (
            [entry("lifo", "lifo")],
            "lifo",
            r"is a function; expected a tiered_kv\.contracts\.Policy",
        ),
        ([entry("lifo", "NAMED")], "lifo", "calls itself 'other'"),
        ([entry("older", "OLDER")], "older", "API version 0"),
        ([entry("shapeless", "SHAPELESS")], "shapeless", r"expected make\(context"),
        ([entry("gone", "GONE")], "gone", "cannot be loaded: AttributeError"),
    ],
)
def test_what_is_wrong_is_told_at_the_door(
    entries: list[EntryPoint], name: str, message: str
) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        Policies(lambda: entries).get(name, "tiers.0.eviction.policy")
