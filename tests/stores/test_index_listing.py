"""A scan that a child process does: the same keys, also where the child ends half way."""

from __future__ import annotations

import logging
import os
import random
import resource
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from tiered_kv.checksum import BlockChecksum
from tiered_kv.index import BlockIndex, Environment, Row, blocks, listing
from tiered_kv.testing.conformance.blocks import NAMESPACE, OTHER_NAMESPACE
from tiered_kv.values import BlockKey, CacheGeometry, ChecksumKind, GroupGeometry, Namespace

KEYS = 4_000
LATE_SECONDS = 60.0
GEOMETRY = CacheGeometry((GroupGeometry(0, 4096, 1, 16),), rank=0, world_size=1)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    opened = Environment.open(
        tmp_path / "index", kind="test", tier="ssd", max_bytes=16 * 2**20, writable=True
    )
    yield opened
    opened.close()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Prefixes that children were asked for; few blocks are many here."""
    asked: list[bytes] = []
    real = listing.list_apart

    def list_apart(
        environment: Environment, prefix: bytes
    ) -> Generator[list[BlockKey] | None, None, None]:
        asked.append(prefix)
        return real(environment, prefix)

    monkeypatch.setattr(listing, "list_apart", list_apart)
    monkeypatch.setattr(listing, "_FIRST_SECONDS", LATE_SECONDS)
    monkeypatch.setattr(blocks, "_MANY_BLOCKS", 10)
    return asked


def odd_keys(seed: int) -> set[BlockKey]:
    """Of every length, with neighbours that are prefixes of each other."""
    choice = random.Random(seed)
    return {BlockKey(choice.randbytes(choice.randint(1, 256))) for _ in range(KEYS)} | {
        BlockKey(b"a" * length) for length in range(1, 257)
    }


def fill(environment: Environment, namespace: Namespace, keys: set[BlockKey]) -> BlockIndex:
    index = BlockIndex(environment, namespace, GEOMETRY)
    row = Row(BlockChecksum(1, 1, ChecksumKind.XXH3), 1, b"", 1)
    with environment.write() as txn:
        index.publish(txn, [(key, row) for key in keys])
    return index


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Children run this instead of Python."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_child_lists_the_same_keys(environment: Environment, children: list[bytes]) -> None:
    mine, theirs = odd_keys(1), odd_keys(2)
    index = fill(environment, NAMESPACE, mine)
    other = fill(environment, OTHER_NAMESPACE, theirs)
    assert list(index.scan()) == sorted(mine)
    assert list(other.scan()) == sorted(theirs)
    print(f"{len(mine)} and {len(theirs)} keys came from {len(children)} children")
    assert children == [NAMESPACE.id, OTHER_NAMESPACE.id]


@pytest.mark.parametrize("sent", [0, 1, 6, 50_000, 300_001])
def test_a_child_that_ends_half_way_is_gone_on_for(
    environment: Environment,
    children: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sent: int,
) -> None:
    mine = odd_keys(3)
    index = fill(environment, NAMESPACE, mine)
    stand_in(tmp_path, monkeypatch, f'"{sys.executable}" "$@" | head -c {sent}')
    with caplog.at_level(logging.WARNING):
        assert list(index.scan()) == sorted(mine)
    assert "listed in this process: the child process ended" in caplog.text
    assert children == [NAMESPACE.id]


def test_a_child_that_stops_sending_and_does_not_end_is_gone_on_for(
    environment: Environment,
    children: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = odd_keys(9)
    index = fill(environment, NAMESPACE, mine)
    monkeypatch.setattr(listing, "_END_SECONDS", 0.1)
    stand_in(tmp_path, monkeypatch, "exec >&-; exec sleep 600")
    assert list(index.scan()) == sorted(mine)
    assert "listed in this process: the child process ended with None" in caplog.text
    assert children == [NAMESPACE.id]


def test_a_child_is_heard_by_a_process_with_many_open_files(
    environment: Environment, children: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    mine = odd_keys(10)
    index = fill(environment, NAMESPACE, mine)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2_048:
        pytest.skip(f"at most {hard} files may be open here")
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2_048, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1_100):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        assert list(index.scan()) == sorted(mine)
    assert caplog.text == ""
    assert children == [NAMESPACE.id]


def test_where_no_child_can_be_started_the_scan_is_here(
    environment: Environment,
    children: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = odd_keys(4)
    index = fill(environment, NAMESPACE, mine)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    assert list(index.scan()) == sorted(mine)
    assert "no child process could be started" in caplog.text
    assert children == [NAMESPACE.id]


def test_a_scan_that_is_given_up_ends_its_child(
    environment: Environment, children: list[bytes]
) -> None:
    index = fill(environment, NAMESPACE, odd_keys(5))
    scan = index.scan()
    first = next(scan)
    assert isinstance(scan, Iterator)
    del scan  # a child that was left running would be told by a ResourceWarning
    assert children == [NAMESPACE.id]
    assert index.contains([first]) == [True]


def test_until_the_child_begins_the_scan_is_here(
    environment: Environment, children: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child lists from the start as well: nothing comes twice, nothing is left out."""
    mine = odd_keys(7)
    index = fill(environment, NAMESPACE, mine)
    monkeypatch.setattr(blocks, "_SCAN_RECORDS", 100)
    real = listing._has_begun
    told: list[bool] = []

    def few_times_not(pipe: IO[bytes]) -> bool:
        told.append(len(told) >= 5 and real(pipe))
        return told[-1]

    monkeypatch.setattr(listing, "_has_begun", few_times_not)
    assert list(index.scan()) == sorted(mine)
    assert told == [False] * 5 + [True]
    assert children == [NAMESPACE.id]


def test_a_scan_that_ends_before_the_child_begins(
    environment: Environment,
    children: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine = odd_keys(8)
    index = fill(environment, NAMESPACE, mine)
    monkeypatch.setattr(listing, "_FIRST_SECONDS", 0.0)
    stand_in(tmp_path, monkeypatch, "exec sleep 600")
    assert list(index.scan()) == sorted(mine)
    assert caplog.text == ""
    assert children == [NAMESPACE.id]


def test_few_blocks_are_listed_without_a_child(
    environment: Environment, children: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = odd_keys(6)
    index = fill(environment, NAMESPACE, mine)
    monkeypatch.setattr(blocks, "_MANY_BLOCKS", len(mine) + 1)
    assert list(index.scan()) == sorted(mine)
    assert children == []
