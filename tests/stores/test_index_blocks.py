from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash

from tiered_kv.checksum import BlockChecksum
from tiered_kv.index import BlockIndex, Environment, FullKey, Holdings, Row
from tiered_kv.index.keyset import KeySet
from tiered_kv.testing.conformance.blocks import NAMESPACE, OTHER_NAMESPACE, key, keys
from tiered_kv.values import BlockKey, CacheGeometry, GroupGeometry, Namespace


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    opened = Environment.open(
        tmp_path / "index", kind="test", tier="ssd", max_bytes=16 * 2**20, writable=True
    )
    yield opened
    opened.close()


def make_index(
    environment: Environment,
    namespace: Namespace = NAMESPACE,
    rank: int = 0,
    world_size: int = 1,
    log_entries: int = 65_536,
) -> BlockIndex:
    geometry = CacheGeometry((GroupGeometry(0, 4096, 1, 16),), rank, world_size)
    return BlockIndex(environment, namespace, geometry, log_entries=log_entries)


def row(number: int, slot_class: int = 0, rank: int = 0) -> Row:
    location = b"%d/%d" % (number, rank)
    return Row(BlockChecksum(4096 + number, 7 * number), slot_class, location, number + 1)


def publish(
    environment: Environment,
    index: BlockIndex,
    *numbers: int,
    slot_class: int = 0,
    rank: int = 0,
) -> list[Row]:
    with environment.write() as txn:
        return index.publish(txn, [(key(n), row(n, slot_class, rank)) for n in numbers])


def oldest(
    environment: Environment, index: BlockIndex, count: int = 100, slot_class: int = 0
) -> list[FullKey]:
    with environment.write() as txn:
        return index.oldest(txn, slot_class, count)


def damage(environment: Environment, database: str, name: bytes) -> None:
    """Flip one bit of a record."""
    handle = environment.database(database)
    with environment.write() as txn:
        record = bytearray(txn.get(name, b"", db=handle))
        record[random.Random(name).randrange(len(record))] ^= 1
        txn.put(name, bytes(record), db=handle)


# ----------------------------------------------------------------------------------------- rows


def test_the_keys_that_have_a_sound_row_of_this_rank_are_told(environment: Environment) -> None:
    ranks = [make_index(environment, rank=rank, world_size=2) for rank in range(2)]
    publish(environment, ranks[0], 1, 2, 3)
    publish(environment, ranks[1], 3, 4, rank=1)
    damage(environment, "rows", ranks[0].full_keys([key(2)])[0] + b"\0\0")
    with environment.read() as txn:
        asked = keys([4, 3, 2, 1, 0, 3])
        assert ranks[0].with_row(txn, asked) == set(keys([1, 3]))
        assert ranks[1].with_row(txn, asked) == set(keys([3, 4]))
        assert ranks[1].with_row(txn, []) == set()


def test_rows_come_back(environment: Environment) -> None:
    index = make_index(environment)
    assert publish(environment, index, 1, 2, 3) == []
    assert index.contains(keys([0, 1, 2, 3])) == [False, True, True, True]
    with environment.read() as txn:
        assert index.rows(txn, keys([3, 0, 1])) == [row(3), None, row(1)]
        full = index.full_keys(keys([1, 2, 3]))
        assert sorted(index.all_rows(txn)) == sorted((f, 0, row(n)) for n, f in enumerate(full, 1))
    assert index.count() == 3
    assert set(index.scan()) == set(keys([1, 2, 3]))


def test_a_row_published_before_wins(environment: Environment) -> None:
    index = make_index(environment)
    publish(environment, index, 1)
    loser = Row(BlockChecksum(1, 1), 0, b"elsewhere", 99)
    with environment.write() as txn:
        assert index.publish(txn, [(key(1), loser), (key(2), row(2))]) == [loser]
        assert index.rows(txn, keys([1])) == [row(1)]
        assert index.publish(txn, [(key(5), row(5)), (key(5), loser)]) == [loser]


def test_of_two_rows_of_a_batch_the_first_wins(environment: Environment) -> None:
    index = make_index(environment)
    first, second = row(1), Row(row(2).checksum, 0, b"elsewhere", 99)
    with environment.write() as txn:
        assert index.publish(txn, [(key(1), first), (key(1), second)]) == [second]
    with environment.read() as txn:
        assert index.rows(txn, keys([1])) == [first]
    assert index.count() == 1


def test_removal_gives_all_ranks_rows_back(environment: Environment) -> None:
    ranks = [make_index(environment, rank=rank, world_size=3) for rank in range(3)]
    for rank, index in enumerate(ranks):
        assert ranks[0].count() == 0
        publish(environment, index, 1, 2, rank=rank)
    assert ranks[0].contains(keys([1, 2])) == [True, True]
    with environment.write() as txn:
        blocks = ranks[1].full_keys(keys([1, 7]))
        assert ranks[1].present(txn, blocks) == blocks[:1]
        assert ranks[1].remove(txn, blocks) == [row(1, rank=rank) for rank in range(3)]
        assert ranks[1].remove(txn, blocks) == []
    for index in ranks:
        assert index.contains(keys([1, 2])) == [False, True]
        assert index.count() == 1


def test_other_namespaces_blocks_can_be_removed(environment: Environment) -> None:
    mine = make_index(environment)
    theirs = [make_index(environment, OTHER_NAMESPACE, rank, 2) for rank in range(2)]
    for rank, index in enumerate(theirs):
        publish(environment, index, 1, rank=rank)
    publish(environment, mine, 1)
    (first, second) = oldest(environment, mine)
    assert (first[:8], second[:8]) == (OTHER_NAMESPACE.id, NAMESPACE.id)
    with environment.write() as txn:
        assert mine.remove(txn, [first]) == [row(1), row(1, rank=1)]
    assert theirs[0].contains(keys([1])) == [False]
    assert theirs[0].count() == 0
    assert mine.contains(keys([1])) == [True]


def test_what_lies_there_is_told_without_an_engine(environment: Environment) -> None:
    mine = make_index(environment, world_size=2)
    theirs = make_index(environment, OTHER_NAMESPACE)
    with environment.write() as txn:
        mine.publish(txn, [(key(1), row(1)), (key(2), row(2))])  # one rank of two
        theirs.publish(txn, [(key(1), row(3))])
    holdings = Holdings.of(environment)
    found = {one.namespace: one for one in holdings.namespaces({NAMESPACE.id})}
    assert found.keys() == {NAMESPACE, OTHER_NAMESPACE}
    half, whole = found[NAMESPACE], found[OTHER_NAMESPACE]
    assert (half.blocks, half.used_bytes, half.in_use) == (0, 4097 + 4098, True)
    assert (whole.blocks, whole.used_bytes, whole.in_use) == (1, 4099, False)
    assert (half.geometry.world_size, whole.geometry.world_size) == (2, 1)
    assert half.geometry.groups == (GroupGeometry(0, 4096, 1, 16),)


def test_all_blocks_of_a_namespace_can_be_forgotten(environment: Environment) -> None:
    index, other = make_index(environment, world_size=2), make_index(environment, OTHER_NAMESPACE)
    with environment.write() as txn:
        index.publish(txn, [(key(n), row(n)) for n in range(5)])
        other.publish(txn, [(key(1), row(9))])
    holdings = Holdings.of(environment)
    with environment.write() as txn:
        first = holdings.blocks(txn, NAMESPACE.id, 3)
        assert len(first) == 3
        assert len(holdings.index.remove(txn, first)) == 3
        rest = holdings.blocks(txn, NAMESPACE.id, 3)
        assert len(holdings.index.remove(txn, rest)) == 2
        holdings.forget(txn, NAMESPACE.id)
    assert [one.namespace for one in holdings.namespaces(())] == [OTHER_NAMESPACE]
    assert list(other.scan()) == [key(1)]


def test_a_damaged_note_of_a_namespace_is_left_out(environment: Environment) -> None:
    make_index(environment)
    make_index(environment, OTHER_NAMESPACE)
    meta = environment.database("meta")
    with environment.write() as txn:
        txn.put(b"namespace:" + NAMESPACE.id.hex().encode(), b'{"fields": 3}', db=meta)
    found = Holdings.of(environment).namespaces(())
    assert [one.namespace for one in found] == [OTHER_NAMESPACE]


def test_keys_of_every_length_are_apart(environment: Environment) -> None:
    index = make_index(environment, world_size=2)
    names = [BlockKey(bytes(length)) for length in (1, 2, 3, 4, 255, 256)]
    with environment.write() as txn:
        index.publish(txn, [(name, row(i)) for i, name in enumerate(names)])
        assert index.rows(txn, names) == [row(i) for i in range(6)]
    for wrong in (b"", bytes(257)):
        with pytest.raises(ValueError, match="1 to 256 bytes"):
            index.contains([BlockKey(wrong)])


def test_a_location_that_is_too_long_is_refused(environment: Environment) -> None:
    index = make_index(environment)
    with pytest.raises(ValueError, match="32 bytes"), environment.write() as txn:
        index.publish(txn, [(key(1), Row(BlockChecksum(1, 1), 0, bytes(33), 1))])


# -------------------------------------------------------------------------------------- recency


def test_the_oldest_come_first_and_the_end_of_a_prefix_before_its_beginning(
    environment: Environment,
) -> None:
    index = make_index(environment)
    publish(environment, index, 1, 2, 3)
    publish(environment, index, 4, 5)
    assert oldest(environment, index) == index.full_keys(keys([3, 2, 1, 5, 4]))
    assert oldest(environment, index, count=2) == index.full_keys(keys([3, 2]))
    index.touch(keys([2, 3, 99]))
    index.flush()
    assert oldest(environment, index) == index.full_keys(keys([1, 5, 4, 3, 2]))


def test_a_touch_is_written_with_the_next_publish(environment: Environment) -> None:
    index = make_index(environment)
    publish(environment, index, 1)
    publish(environment, index, 2)
    index.touch(keys([1]))
    publish(environment, index, 3)
    assert oldest(environment, index) == index.full_keys(keys([2, 1, 3]))


def test_classes_are_numbered_once_and_counted(environment: Environment) -> None:
    index, other = make_index(environment), make_index(environment, OTHER_NAMESPACE)
    with environment.write() as txn:
        small, large = index.slot_class(txn, 0, 4096), index.slot_class(txn, 0, 8192)
        assert index.slot_class(txn, 0, 4096) == small
        theirs = other.slot_class(txn, 0, 4096)
        group = index.slot_class(txn, 1, 4096)
        assert len({small, large, theirs, group, 0}) == 5
    publish(environment, index, 1, 2, slot_class=small)
    publish(environment, index, 3, slot_class=large)
    publish(environment, other, 1, slot_class=theirs)
    with environment.write() as txn:
        index.remove(txn, index.full_keys(keys([2])))
        found = {one.number: one for one in index.classes(txn)}
        assert index.oldest(txn, large, 9) == index.full_keys(keys([3]))
    assert {n: (c.blocks, c.slot_bytes) for n, c in found.items()} == {
        small: (1, 4096),
        large: (1, 8192),
        theirs: (1, 4096),
        group: (0, 4096),
    }
    assert found[theirs].namespace_id == OTHER_NAMESPACE.id
    assert found[group].oldest is None
    ticks = [found[number].oldest for number in (small, large, theirs)]
    assert ticks == sorted(tick for tick in ticks if tick is not None)


def test_generations_are_never_given_twice(environment: Environment) -> None:
    index = make_index(environment)
    with environment.write() as txn:
        first = index.next_generation(txn, 10)
        assert index.next_generation(txn, 1) == first + 10
        assert index.next_generation(txn, 1) == first + 11


# ---------------------------------------------------------------------------------------- damage


def test_a_damaged_row_is_a_miss_and_can_be_stored_again(environment: Environment) -> None:
    ranks = [make_index(environment, rank=rank, world_size=2) for rank in range(2)]
    for rank, index in enumerate(ranks):
        publish(environment, index, 1, 2, rank=rank)
    (full,) = ranks[0].full_keys(keys([1]))
    damage(environment, "rows", full + b"\0\0")
    with environment.read() as txn:
        assert ranks[0].rows(txn, keys([1, 2])) == [None, row(2)]
    assert ranks[0].contains(keys([1, 2])) == [False, True]
    assert publish(environment, ranks[0], 1) == [row(1, rank=1)], "the other rank's room is free"
    assert ranks[0].contains(keys([1, 2])) == [False, True]
    publish(environment, ranks[1], 1, rank=1)
    assert ranks[1].contains(keys([1, 2])) == [True, True]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_row_that_nobody_read_gives_way(
    environment: Environment, world_size: int
) -> None:
    ranks = [make_index(environment, rank=r, world_size=world_size) for r in range(world_size)]
    for rank, index in enumerate(ranks):
        publish(environment, index, 1, 2, rank=rank)
    cursor = ranks[0].changes(None).cursor
    [full] = ranks[0].full_keys([key(1)])
    damage(environment, "rows", full + b"\0\0")
    freed = publish(environment, ranks[0], 1)
    assert freed == [row(1, rank=rank) for rank in range(1, world_size)]
    for rank, index in enumerate(ranks[1:], 1):
        assert index.contains([key(1)]) == [False]
        publish(environment, index, 1, rank=rank)
    assert ranks[0].contains(keys([1, 2])) == [True, True]
    assert ranks[0].count() == 2
    with environment.read() as txn:
        assert [index.rows(txn, [key(1)]) for index in ranks] == [
            [row(1, rank=rank)] for rank in range(world_size)
        ]
    assert ranks[0].changes(cursor).changes == ((key(1), False), (key(1), True))


def test_a_damaged_block_record_is_a_miss_and_is_made_again(environment: Environment) -> None:
    index = make_index(environment)
    publish(environment, index, 1, 2)
    (full,) = index.full_keys(keys([1]))
    damage(environment, "blocks", full)
    assert index.contains(keys([1, 2])) == [False, True]
    assert list(index.scan()) == keys([2])
    assert oldest(environment, index) == index.full_keys(keys([2]))
    with environment.write() as txn:
        assert index.remove(txn, [full]) == [row(1)]
    publish(environment, index, 1)
    assert index.contains(keys([1, 2])) == [True, True]


def test_every_flipped_bit_of_a_row_is_found(environment: Environment) -> None:
    packed = row(5).pack(b"name")
    assert Row.unpack(b"name", packed) == row(5)
    assert Row.unpack(b"nama", packed) is None
    found = 0
    for bit in range(len(packed) * 8):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        found += Row.unpack(b"name", bytes(flipped)) is None
    print(f"{found} of {len(packed) * 8} flipped bits found")
    assert found == len(packed) * 8
    assert Row.unpack(b"name", b"") is None


def test_rows_that_lead_nowhere_are_dropped(environment: Environment) -> None:
    index = make_index(environment)
    publish(environment, index, 1, 2)
    index.distrust(keys([1]))
    assert index.contains(keys([1, 2])) == [False, True]
    assert publish(environment, index, 3) == [row(1)]
    assert index.count() == 2


def test_a_transaction_that_is_given_up_leaves_doubts_as_they_were(
    environment: Environment,
) -> None:
    index = make_index(environment)
    publish(environment, index, 1, 2, 3)
    index.distrust(keys([1, 2]))
    for given in (4, 1):
        with suppress(InterruptedError), environment.write() as txn:
            assert len(index.publish(txn, [(key(given), row(given))])) == 2
            raise InterruptedError
        assert index.contains(keys([1, 2, 3, 4])) == [False, False, True, False]
    with environment.write() as txn:
        assert {*index.publish(txn, [(key(1), row(9))])} == {row(1), row(2)}
        assert index.remove(txn, index.full_keys(keys([3]))) == [row(3)], "1 is sound by now"
    assert index.contains(keys([1, 2, 3])) == [True, False, False]
    publish(environment, index, 2)
    assert index.contains(keys([1, 2])) == [True, True], "nothing is doubted any more"


# --------------------------------------------------------------------------------------- changes


def test_the_log_tells_what_became_whole_and_what_went(environment: Environment) -> None:
    ranks = [make_index(environment, rank=rank, world_size=2) for rank in range(2)]
    other = make_index(environment, OTHER_NAMESPACE)
    start = ranks[0].changes(None)
    assert (start.changes, start.restart) == ((), False)
    publish(environment, ranks[0], 1, 2)
    publish(environment, other, 1)
    assert ranks[0].changes(start.cursor).changes == ()
    publish(environment, ranks[1], 2, 1)
    with environment.write() as txn:
        ranks[0].remove(txn, ranks[0].full_keys(keys([2])))
    batch = ranks[0].changes(start.cursor)
    assert batch.changes == ((key(2), True), (key(1), True), (key(2), False))
    assert ranks[0].changes(batch.cursor) == type(batch)(batch.cursor, ())
    publish(environment, ranks[0], 3)
    with environment.write() as txn:
        ranks[0].remove(txn, ranks[0].full_keys(keys([3])))
    assert ranks[0].changes(batch.cursor).changes == (), "3 was never whole"


def test_a_log_that_was_cut_asks_for_a_restart(environment: Environment) -> None:
    index = make_index(environment, log_entries=10)
    cursor = index.changes(None).cursor
    for number in range(10):
        publish(environment, index, number)
    assert [k for k, _ in index.changes(cursor).changes] == keys(range(10))
    publish(environment, index, 10)
    batch = index.changes(cursor)
    assert (batch.changes, batch.restart) == ((), True)
    assert index.changes(batch.cursor) == type(batch)(batch.cursor, ())
    with environment.read() as txn:
        assert txn.stat(environment.database("log"))["entries"] == 10


def test_the_log_is_cut_by_whole_batches(environment: Environment) -> None:
    index = make_index(environment, log_entries=10)
    cursors = [index.changes(None).cursor]
    for batch in range(6):
        publish(environment, index, *range(4 * batch, 4 * batch + 4))
        cursors.append(index.changes(None).cursor)
    told = [index.changes(cursor) for cursor in cursors]
    assert [one.restart for one in told] == [True] * 3 + [False] * 4
    assert [[k for k, _ in one.changes] for one in told[3:]] == [
        keys(range(4 * batch, 24)) for batch in range(3, 7)
    ]


def test_a_cursor_of_an_earlier_life_asks_for_a_restart(tmp_path: Path) -> None:
    def life() -> tuple[int, int]:
        environment = Environment.open(
            tmp_path / "index", kind="test", tier="ssd", max_bytes=2**22, writable=True
        )
        index = make_index(environment)
        start = index.changes(None).cursor
        publish(environment, index, *range(5))
        if earlier is not None:
            assert all(index.changes(cursor).restart for cursor in earlier)
        environment.close()
        return start, index_cursor(tmp_path)

    def index_cursor(path: Path) -> int:
        environment = Environment.open(
            path / "index", kind="test", tier="ssd", max_bytes=2**22, writable=True
        )
        cursor = make_index(environment).changes(None).cursor
        environment.close()
        return cursor

    earlier: tuple[int, int] | None = None
    earlier = life()
    (tmp_path / "index" / "data.mdb").unlink()
    life()


def test_a_scan_goes_on_while_blocks_change(environment: Environment) -> None:
    index = make_index(environment)
    publish(environment, index, *range(5000))
    scan = index.scan()
    seen = {next(scan) for _ in range(10)}
    with environment.write() as txn:
        index.remove(txn, index.full_keys(keys(range(2500))))
    seen.update(scan)
    assert set(keys(range(2500, 5000))) <= seen <= set(keys(range(5000)))
    print(f"{len(seen)} keys seen, 2500 of 5000 removed meanwhile")
    assert index.count() == 2500


# --------------------------------------------------------------------------------------- key set


def test_the_key_set_is_a_set() -> None:
    ours, model = KeySet(), set[bytes]()
    choice = random.Random(3)
    for _ in range(1500):
        some = [choice.randrange(3000).to_bytes(4, "big") for _ in range(choice.randrange(30))]
        if choice.random() < 0.55:
            ours.add(some)
            model |= set(some)
        else:
            ours.discard(some)
            model -= set(some)
        count = choice.choice((1, 20, 100, 600))
        asked = [choice.randrange(3000).to_bytes(4, "big") for _ in range(count)]
        assert ours.contains(asked) == [one in model for one in asked]
        assert len(ours) == len(model)
    print(f"{len(model)} keys at the end")
    assert len(model) > 500


def test_a_look_up_keeps_the_lock_of_the_interpreter() -> None:
    keyset = KeySet()
    keyset.add(number.to_bytes(8, "big") for number in range(100_000))
    asked = [number.to_bytes(8, "big") for number in range(99_000, 101_000)]
    turns = 0
    over = threading.Event()

    def want_the_lock() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1
            time.sleep(0)  # lets go of it, and wants it back

    other = threading.Thread(target=want_the_lock, daemon=True)
    other.start()
    lost = found = 0
    interval = sys.getswitchinterval()
    try:
        for number in range(300):
            sys.setswitchinterval(60)  # nobody is made to let go of it
            before = turns
            found += sum(keyset.contains(asked))
            lost += turns - before
            sys.setswitchinterval(interval)
            if not number % 4:
                time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        other.join(10)
    print(f"{found} keys found, beside a thread that had {turns} turns")
    assert found == 300 * 1000
    assert turns > 50
    assert not lost, f"the lock was lost {lost} times"


def test_a_key_set_is_taken_away_from_one_of_the_same_seed() -> None:
    one = KeySet()
    two = KeySet(one.seed)
    one.add(number.to_bytes(2, "big") for number in range(3000))
    two.add(number.to_bytes(2, "big") for number in range(2000, 5000))
    one.difference_update(two)
    assert len(one) == 2000
    asked = [number.to_bytes(2, "big") for number in (0, 1999, 2000, 4999)]
    assert one.contains(asked) == [True, True, False, False]
    assert two.contains(asked) == [False, False, True, True]
    assert KeySet().seed != one.seed


def test_keys_of_one_hash_count_as_one_until_the_first_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those whose hash is one of the two numbers that mark a place of the table."""

    def digest(key: bytes, seed: int) -> bytes:
        assert seed == 7
        return key[:1].rjust(8, b"\0")

    def number(key: bytes, seed: int) -> int:
        return int.from_bytes(digest(key, seed), "big")

    monkeypatch.setattr(xxhash, "xxh3_64_digest", digest)
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", number)
    for first in (0, 1, 2, 200):
        ours = KeySet(7)
        pair = [bytes([first, 1]), bytes([first, 2])]
        ours.add(pair)
        assert (len(ours), ours.contains(pair)) == (1, [True, True])
        assert ours.contains([b"\x64"]) == [False]
        ours.discard(pair[:1])
        assert (len(ours), ours.contains(pair)) == (0, [False, False])
        ours.add(pair[1:])
        assert ours.contains(pair) == [True, True]


def test_the_key_set_takes_at_most_40_bytes_a_key_and_bounded_room_under_churn() -> None:
    keyset = KeySet()
    for start in range(0, 200_000, 1000):
        keyset.add(number.to_bytes(8, "big") for number in range(start, start + 1000))
        if len(keyset) > 2000:
            assert keyset.nbytes <= 40 * len(keyset)
    largest = keyset.nbytes
    for start in range(0, 400_000, 1000):
        keyset.discard(number.to_bytes(8, "big") for number in range(start, start + 1000))
        keyset.add(number.to_bytes(8, "big") for number in range(start + 200_000, start + 201_000))
    print(f"{len(keyset)} keys in {keyset.nbytes} bytes")
    assert len(keyset) == 200_000
    assert keyset.nbytes <= 2 * largest
    assert keyset.contains([]) == []


def test_a_block_whose_row_was_lost_is_visible_again_when_it_is_published(
    environment: Environment,
) -> None:
    index = make_index(environment)
    publish(environment, index, 1, 2)
    rows = environment.database("rows")
    with environment.write() as txn:
        assert txn.delete(index.full_keys(keys([1]))[0] + b"\0\0", db=rows)
    publish(environment, index, 1)
    assert index.contains(keys([1, 2])) == [True, True]
    assert index.count() == 2


@pytest.mark.parametrize("found", [b"", b"\xff" * 24])
def test_a_damaged_counter_gives_no_number_twice(environment: Environment, found: bytes) -> None:
    index = make_index(environment)
    publish(environment, index, *range(10))
    with environment.write() as txn:
        first = index.next_generation(txn, 100)
        number = index.slot_class(txn, 0, 4096)
    meta = environment.database("meta")
    for name in (b"tick", b"generation", b"log", b"class"):
        with environment.write() as txn:
            assert txn.get(name, db=meta)
            txn.put(name, found, db=meta)
    cursor = index.changes(None).cursor
    publish(environment, index, *range(10, 20))
    assert index.changes(cursor).restart
    with environment.write() as txn:
        assert index.next_generation(txn, 1) > first + 100
        assert index.slot_class(txn, 1, 4096) > number
    assert oldest(environment, index, 10) == index.full_keys(keys(reversed(range(10))))
