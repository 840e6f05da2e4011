"""Copying from store to store: what is used most goes first, and stays longest."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.command_line import Cli
from tests.stores.upkeep_tiers import RANKS, Tiers
from tiered_kv.contracts import BlockStore, RanksByUse
from tiered_kv.testing.conformance.blocks import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_held,
    key,
    keys,
)
from tiered_kv.upkeep import Copied, copy_blocks, most_used_first
from tiered_kv.values import BlockKey

KINDS = ("nvme", "lmdb")
WHOLE = RANKS * BLOCK_BYTES
"""Bytes of a block, all ranks together."""

ORDER = (7, 2, 5)
"""Blocks that are used after all were stored, the most recent first."""


@pytest.fixture(params=KINDS)
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Tiers:
    made = Tiers(request.param, tmp_path)
    made.fill("a", range(10))
    with made.opened("a", 0) as store:
        store.touch(keys(ORDER))
    return made


@contextmanager
def ranks(tiers: Tiers, tier: str) -> Iterator[dict[int, BlockStore]]:
    with ExitStack() as stack:
        yield {rank: stack.enter_context(tiers.opened(tier, rank)) for rank in range(RANKS)}


def order(store: BlockStore) -> list[BlockKey]:
    assert isinstance(store, RanksByUse)
    return list(store.hottest())


def copied(tiers: Tiers, most_bytes: int | None = None, batch_bytes: int = 8 * WHOLE) -> Copied:
    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        return copy_blocks(
            sources,
            targets,
            most_used_first(sources[0]),
            block_bytes=BLOCK_BYTES,
            most_bytes=most_bytes,
            batch_bytes=batch_bytes,
        )


def test_the_most_used_come_first(tiers: Tiers) -> None:
    with tiers.opened("a", 0) as store:
        found = order(store)
        assert sorted(found) == sorted(store.scan()) == sorted(keys(range(10)))
        assert found[: len(ORDER)] == keys(ORDER)
        store.touch(keys([4]))  # not written yet
        assert order(store)[:2] == keys([4, ORDER[0]])


@pytest.mark.parametrize("blocks_together", [1, 4, 100])
def test_a_copy_is_whole_and_evicts_in_the_same_order(tiers: Tiers, blocks_together: int) -> None:
    done = copied(tiers, batch_bytes=blocks_together * WHOLE)
    assert done == Copied(blocks=10, bytes=10 * WHOLE)
    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        assert order(targets[0]) == order(sources[0])
        for rank, store in targets.items():
            assert_held(store, range(10), rank)
    again = copied(tiers)
    print("first:", done, "again:", again)
    assert again == Copied(present=10)


def test_with_a_limit_the_most_used_are_copied_and_the_rest_later(tiers: Tiers) -> None:
    done = copied(tiers, most_bytes=3 * WHOLE + 1)
    assert done == Copied(blocks=3, bytes=3 * WHOLE, limited=True)
    with ranks(tiers, "b") as targets:
        assert order(targets[0]) == keys(ORDER)
    done = copied(tiers, most_bytes=7 * WHOLE)
    assert done == Copied(blocks=7, bytes=7 * WHOLE, present=3)


def test_what_is_damaged_is_left_out(tiers: Tiers) -> None:
    tiers.flip("a", 2, rank=1, bit=100 * 8)
    done = copied(tiers)
    assert done == Copied(blocks=9, bytes=9 * WHOLE, corrupt=1)
    with ranks(tiers, "b") as targets:
        assert key(2) not in order(targets[0])


@pytest.mark.parametrize("batch_bytes", [WHOLE, 4 * WHOLE, 9 * WHOLE])
def test_nothing_that_was_copied_is_evicted_for_what_is_used_less(
    tmp_path: Path, batch_bytes: int
) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        tiers = Tiers(kind, tmp_path / kind)
        tiers.fill("a", range(120))
        small = tmp_path / kind / "b"
        with ranks(tiers, "a") as sources:
            expected = order(sources[0])
            tight = Tiers(kind, tmp_path / kind, capacity="8MiB")
            with ranks(tight, "b") as targets:
                done = copy_blocks(
                    sources,
                    targets,
                    most_used_first(sources[0]),
                    block_bytes=BLOCK_BYTES,
                    batch_bytes=batch_bytes,
                )
        print(f"{kind}: {done}")
        assert small.is_dir()
        assert done.full
        assert 10 < done.blocks < 100
        with ranks(tight, "b") as targets:
            held = order(targets[0])
        assert done.blocks - 20 <= len(held) <= done.blocks
        assert held == expected[: len(held)]


def test_the_pace_hears_of_all_bytes(tiers: Tiers) -> None:
    heard: list[int] = []
    advanced: list[int] = []
    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        copy_blocks(
            sources,
            targets,
            most_used_first(sources[0]),
            block_bytes=BLOCK_BYTES,
            batch_bytes=2 * WHOLE,
            pace=heard.append,
            progress=advanced.append,
        )
    assert heard == [2 * WHOLE] * 5
    assert sum(advanced) == 10


def test_an_interrupted_copy_goes_on(tiers: Tiers) -> None:
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        with pytest.raises(KeyboardInterrupt):
            copy_blocks(
                sources,
                targets,
                most_used_first(sources[0]),
                block_bytes=BLOCK_BYTES,
                batch_bytes=4 * WHOLE,
                pace=interrupt,
            )
        assert set(order(targets[0])) == set(order(sources[0])[:4])
    assert copied(tiers) == Copied(blocks=6, bytes=6 * WHOLE, present=4)
    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        assert order(targets[0]) == order(sources[0])


def test_stores_of_other_ranks_are_refused(tiers: Tiers) -> None:
    with ranks(tiers, "a") as sources, pytest.raises(ValueError, match="ranks"):
        copy_blocks(sources, {}, [], block_bytes=BLOCK_BYTES)


# The command


def warm(tiers: Tiers, source: str | Path) -> tuple[str | Path, ...]:
    return ("warm", "--from", source, "--config", tiers.config, "--tier", "b")


def test_from_a_directory_and_from_a_tier(cli: Cli, tiers: Tiers) -> None:
    size = cli(*warm(tiers, tiers.folder / "a"), "--dry-run", "--rate", "1MiB", "--json")
    assert size.json["source_blocks"] == 10
    assert size.json["tiers"] == {"b": {"most_bytes": 10 * WHOLE}}
    assert size.json["seconds"] == 10 * WHOLE / 2**20
    assert not (tiers.folder / "b").exists()

    ran = cli(*warm(tiers, tiers.folder / "a"), "--max-bytes", f"{3 * WHOLE}B", "--json")
    assert ran.code == 0, ran.err
    first = ran.json["tiers"]["b"]
    assert (first["blocks"], first["present"], first["limited"]) == (3, 0, True)
    ran = cli(*warm(tiers, f"{tiers.config}:a"))
    assert ran.code == 0, ran.err
    assert "tier b: 7 of 10 blocks" in ran.out
    assert "copied; 3 were there already" in ran.out
    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        assert order(targets[0]) == order(sources[0])


def test_a_copy_of_the_directory_is_only_read(cli: Cli, tiers: Tiers) -> None:
    shipped = tiers.folder / "shipped"
    shutil.copytree(tiers.folder / "a", shipped)
    before = {
        file: (file.stat().st_mtime_ns, file.stat().st_size)
        for file in shipped.rglob("*")
        if file.is_file()
    }
    assert cli(*warm(tiers, shipped)).code == 0
    after = {
        file: (file.stat().st_mtime_ns, file.stat().st_size)
        for file in shipped.rglob("*")
        if file.is_file() and "lock" not in file.name
    }
    assert after
    assert after == {file: before[file] for file in after}


def test_another_fingerprint_is_refused_by_its_fields(cli: Cli, tiers: Tiers) -> None:
    tiers.fill("b", range(20, 22), other=True)
    archive = tiers.folder / "archive"
    name = NAMESPACE.id.hex()
    export = ("export", tiers.config, archive, "--tier", "a", "--namespace", name)
    assert cli(*export).code == 0
    for command in (
        warm(tiers, tiers.folder / "a"),
        ("import", tiers.config, archive, "--tier", "b"),
    ):
        ran = cli(*command)
        assert (ran.code, ran.out) == (2, "")
        print(ran.err)
        assert f"From the nearest, {OTHER_NAMESPACE.id.hex()}, it differs in" in ran.err
        assert "\n  model: tests/tiny here, tests/other there\n" in ran.err
        assert "dtype" not in ran.err
    with ranks(tiers, "b") as targets:
        assert order(targets[0]) == []
    for command in (
        warm(tiers, tiers.folder / "a"),
        ("import", tiers.config, archive, "--tier", "b"),
    ):
        assert cli(*command, "--new-namespace").code == 0
    with ranks(tiers, "b") as targets:
        assert len(order(targets[0])) == 10


def test_an_archive_holds_the_most_used_and_keeps_their_order(cli: Cli, tiers: Tiers) -> None:
    archive = tiers.folder / "archive"
    name = NAMESPACE.id.hex()
    where = ("--tier", "a", "--namespace", name, "--limit", f"{4 * WHOLE}B", "--rate", "1GiB")
    assert cli("export", tiers.config, archive, *where).code == 0
    ran = cli("import", tiers.config, archive, "--tier", "b", "--rate", "1GiB", "--json")
    assert ran.json["parts"] == 4 * RANKS
    with ranks(tiers, "a") as sources, ranks(tiers, "b") as targets:
        assert order(targets[0]) == order(sources[0])[:4]
        assert order(targets[0])[:3] == keys(ORDER)


def test_what_is_no_source(cli: Cli, tiers: Tiers) -> None:
    empty = tiers.folder / "empty"
    empty.mkdir()
    for source, said in (
        (str(empty), "is no directory of a store (tiered-kv.json is not in it)"),
        (str(tiers.folder / "none"), "neither the directory of a store nor CONFIG:TIER"),
        (f"{tiers.config}:c", "has no tier 'c'"),
        (f"{tiers.config}:b", "holds no blocks"),
    ):
        ran = cli(*warm(tiers, source))
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err
    (empty / "tiered-kv.json").write_text('{"kind": "paper"}')
    assert "does not tell what it is" in cli(*warm(tiers, empty)).err
    own = cli("warm", "--from", tiers.folder / "a", "--config", tiers.config, "--tier", "a")
    assert (own.code, "is tier 'a' itself" in own.err) == (2, True)
    tiers.fill("a", range(2), other=True)
    ran = cli(*warm(tiers, tiers.folder / "a"))
    assert (ran.code, "holds several namespaces; choose with --namespace" in ran.err) == (2, True)
    chosen = cli(*warm(tiers, tiers.folder / "a"), "--namespace", OTHER_NAMESPACE.id.hex()[:6])
    assert chosen.code == 0, chosen.err
    assert "tier b: 2 of 2 blocks" in chosen.out
    read_only = ("warm", "--from", tiers.folder / "a", "--config", tiers.read_only, "--tier", "b")
    assert "this tier is read only" in cli(*read_only).err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("prompts.txt",), "takes no FILE"),
        (("--model", "m"), "is for prompts, not for --from"),
        (("--batch", "8"), "is for prompts, not for --from"),
        (("--timeout", "1s"), "is for prompts, not for --from"),
        (("--keep-share", "50"), "is for --keep"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    cli: Cli, tiers: Tiers, arguments: tuple[str, ...], said: str
) -> None:
    ran = cli(*warm(tiers, tiers.folder / "a"), *arguments)
    assert (ran.code, said in ran.err) == (2, True), ran.err
    if arguments[0].startswith("-"):
        assert arguments[0] in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "1MiB"), "is for --from"),
        (("--new-namespace",), "is for --from"),
        (("--tokens-per-second", "9"), "is for --dry-run"),
    ],
)
def test_so_are_those_of_a_copy_with_prompts(
    cli: Cli, tiers: Tiers, arguments: tuple[str, ...], said: str
) -> None:
    ran = cli("warm", "prompts.txt", "--config", tiers.config, "--model", "m", *arguments)
    assert (ran.code, said in ran.err, arguments[0] in ran.err) == (2, True, True), ran.err
