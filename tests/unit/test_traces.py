"""Traces of every format, and what is said of a bad one."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tiered_kv.errors import TraceError
from tiered_kv.planning import TraceKind, read_trace
from tiered_kv.planning.kv_events import events_in


def lines(file: Path, values: Sequence[Any]) -> Path:
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return file


def mooncake(time: int, ids: list[int], tokens: int, answer: int = 5) -> dict[str, Any]:
    return {"timestamp": time, "input_length": tokens, "output_length": answer, "hash_ids": ids}


HEADER = {
    "format": "tiered-kv trace",
    "version": 1,
    "block_tokens": 16,
    "bytes_per_token": 1024.0,
    "secret": "ab",
}
REQUEST = {
    "time": 1000.5,
    "tokens": 40,
    "output_tokens": 3,
    "hits": {"host": 16},
    "dropped": 0,
    "blocks": ["0a", "ff"],
}


def stored(hashes: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [7] * 16 * len(hashes),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


# The formats


def test_mooncake(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "t",
        [mooncake(3000, [0, 1, 2], 1100), mooncake(1000, [0], 512), mooncake(1000, [5], 3)],
    )
    trace = read_trace(file)
    print(trace)
    assert trace.kind is TraceKind.MOONCAKE
    assert trace.block_tokens == 512
    assert [request.time for request in trace.requests] == [1.0, 1.0, 3.0]
    assert [request.keys for request in trace.requests] == [(0,), (5,), (0, 1, 2)]
    assert [request.output_tokens for request in trace.requests] == [5, 5, 5]
    assert (trace.tokens, trace.seconds, trace.distinct_blocks) == (1615, 2.0, 4)


def test_recorded_by_us(tmp_path: Path) -> None:
    later = {**REQUEST, "time": 1003.0, "hits": {"host": 16, "ssd": 16}, "dropped": 2}
    lines(tmp_path / "trace-2.jsonl", [HEADER, later])
    lines(tmp_path / "trace-1.jsonl", [HEADER, REQUEST])
    (tmp_path / "secret").write_bytes(bytes(32))
    trace = read_trace(tmp_path)
    assert [request.time for request in trace.requests] == [0.0, 2.5]
    assert trace.requests[0].keys == (10, 255)
    assert trace.bytes_per_token == 1024.0
    assert trace.recorded_hits == {"host": 32, "ssd": 16}
    assert len(trace.notes) == 1
    assert read_trace(tmp_path / "trace-1.jsonl").requests[0].tokens == 40


EVENTS: list[list[Any]] = [
    [10.0, [stored([1, 2, 3]), stored([4], 3)], 0],
    [11.0, [{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}]],
    [12.5, [stored([3], 2), stored([9], medium="CPU"), stored([9], group_idx=1)]],
    [13.0, [{"type": "AllBlocksCleared"}]],
]


def test_kv_events_as_json(tmp_path: Path) -> None:
    trace = read_trace(lines(tmp_path / "t", EVENTS))
    print(trace)
    assert trace.kind is TraceKind.KV_EVENTS
    assert trace.block_tokens == 16
    assert [request.time for request in trace.requests] == [0.0, 0.0, 2.5]
    first, second, again = (request.keys for request in trace.requests)
    assert again == first[2:]
    assert len({*first, *second}) == 4
    assert not trace.whole_requests
    assert [note.partition(":")[0] for note in trace.notes[1:]] == ["Left out"] * 3


def as_bytes(event: dict[str, Any]) -> dict[str, Any]:
    if "block_hashes" not in event:
        return event
    return {**event, "block_hashes": [bytes([number]) * 32 for number in event["block_hashes"]]}


def test_kv_events_as_published(tmp_path: Path) -> None:
    """Batches in msgpack, one behind the other, with hashes that are bytes."""
    hashed = [(time, [as_bytes(event) for event in events], 0) for time, events, *_ in EVENTS]
    file = tmp_path / "t"
    file.write_bytes(b"".join(map(msgspec.msgpack.encode, hashed)))
    trace = read_trace(file)
    expected = read_trace(lines(tmp_path / "j", EVENTS))
    assert [r.keys for r in trace.requests] == [r.keys for r in expected.requests]
    print(len(trace.requests), "runs of blocks")


ODD: list[Any] = [
    None,
    True,
    -1,
    -33,
    200,
    70_000,
    2**40,
    -(2**40),
    1.5,
    "a" * 10,
    "b" * 40,
    "c" * 300,
    "d" * 70_000,
    b"e" * 10,
    b"f" * 300,
    b"g" * 70_000,
    [1] * 20,
    [[]] * 70_000,
    {str(n): n for n in range(20)},
    {str(n): [n] for n in range(70_000)},
    msgspec.msgpack.Ext(5, b"h"),
    msgspec.msgpack.Ext(5, b"i" * 16),
    msgspec.msgpack.Ext(5, b"j" * 300),
]


def test_every_kind_of_msgpack_value_ends_where_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(b"".join(map(msgspec.msgpack.encode, ODD)))
    found = [value for _, value in events_in(file, file.read_bytes())]
    assert found == ODD
    for size in (1, 5, 30):
        file.write_bytes(msgspec.msgpack.encode(["x" * 40, {"y": 1.0}])[:-size])
        with pytest.raises(TraceError, match="cut off"):
            list(events_in(file, file.read_bytes()))


# Bad ones: file and line, what was found, and what was expected

BAD: dict[str, tuple[list[Any], str]] = {
    "empty": ([""], ":1: is empty; expected a trace"),
    "prose": (["GET /index.html"], "neither JSON nor msgpack"),
    "half an object": ([mooncake(1, [1], 9), '{"timestamp": 1, "inp'], ":2: is not JSON"),
    "another object": ([{"a": 1}], ":1: is no trace: expected timestamp"),
    "no ids": (
        [mooncake(1, [1], 9), {"timestamp": 1, "input_length": 5}],
        ":2: hash_ids is missing",
    ),
    "ids of text": (
        [{**mooncake(1, [1], 9), "hash_ids": ["a"]}],
        ":1: hash_ids is ['a'], not a list of whole numbers",
    ),
    "no time": ([{**mooncake(1, [1], 9), "timestamp": "noon"}], ":1: timestamp is 'noon'"),
    "negative": ([mooncake(1, [1], -9)], ":1: input_length is -9"),
    "half a token": ([{**mooncake(1, [1], 9), "output_length": 0.5}], "not a whole number"),
    "too many blocks": (
        [mooncake(1, [1, 2], 9)],
        ":1: 2 blocks for a prompt of 9 tokens, which has 1 of 512 tokens; give the trace's own",
    ),
    "a list among objects": ([mooncake(1, [1], 9), [1, 2]], ":2: is no object with named values"),
    "newer": ([{**HEADER, "version": 9}], ":1: is of version 9 of the format"),
    "no block": ([{**HEADER, "block_tokens": 0}], ":1: block_tokens is 0"),
    "header alone": ([HEADER], "holds no request yet"),
    "digests": ([HEADER, {**REQUEST, "blocks": ["xyz"]}], ":2: blocks is ['xyz'], not a list of"),
    "hits": ([HEADER, {**REQUEST, "hits": {"host": "all"}}], ":2: hits: host is 'all'"),
    "an unknown event": (
        [[1.0, [{"type": "BlockMoved"}]]],
        ":1: an event of the type 'BlockMoved'",
    ),
    "no batch": ([[1.0, [stored([1])]], [2.0]], ":2: is no batch of events"),
    "a time of text": ([["noon", []]], ":1: its time is 'noon'"),
    "another block size": (
        [[1.0, [stored([1])]], [2.0, [stored([2], block_size=32)]]],
        ":2: a block of 32 tokens after blocks of 16",
    ),
    "no hashes": ([[1.0, [{"type": "BlockStored"}]]], ":1: BlockStored needs block_hashes"),
    "nested deeply": ([mooncake(1, [1], 9), "[" * 100_000], ":2: is not JSON"),
    "nested deeply at once": (['{"a":' * 100_000], ":1: is not JSON"),
    "nested in a field": (
        [{**mooncake(1, [1], 9), "hash_ids": json.loads("[" * 500 + "]" * 500)}],
        ":1: hash_ids is [[[",
    ),
    "very many tokens": ([mooncake(1, [1], 10**17)], ":1: input_length is 1e+17, more than"),
    "no end of tokens": ([{**mooncake(1, [1], 9), "input_length": float("inf")}], ":1: input_leng"),
    "never": ([[float("inf"), [stored([1])]]], ":1: its time is inf, not a number of seconds"),
    "no time at all": ([[1.0, []], [float("nan"), [stored([1])]]], ":2: its time is nan"),
    "a time of many digits": ([[1.5, []], [10**400, [stored([1])]]], ":2: its time is 1000"),
    "a huge block": (
        [[1.0, [stored([1], block_size=10**30)]]],
        ":1: block_size is 1000000000000000000000000000000, not 1 to 1048576 tokens",
    ),
    "an empty block": ([[1.0, [stored([1], block_size=0)]]], ":1: block_size is 0, not 1 to"),
    "a part of a byte": ([{**HEADER, "bytes_per_token": 1e-300}], ":1: bytes_per_token is 1e-300"),
    "blank lines": (["\n \n\n"], ":1: is empty; expected a trace"),
    "prose behind blank lines": (["\n\nGET /index.html"], ":3: is neither JSON nor msgpack"),
    "removed alone": (
        [[1.0, [{"type": "BlockRemoved", "block_hashes": [1]}]]],
        "tells of no stored block",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces(name: str, tmp_path: Path) -> None:
    values, expected = BAD[name]
    file = tmp_path / "bad.jsonl"
    file.write_text(
        "".join(value if isinstance(value, str) else f"{json.dumps(value)}\n" for value in values)
    )
    with pytest.raises(TraceError) as raised:
        read_trace(file)
    text = str(raised.value)
    print(text)
    assert text.startswith(str(file))
    assert expected in text
    assert file.exists()


def test_msgpack_that_is_nested_too_deeply(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_bytes(b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(TraceError, match="batch 1 at byte 0: is neither JSON nor msgpack"):
        read_trace(file)


FIRST: dict[str, list[Any]] = {
    "mooncake": [mooncake(1, [1], 9), mooncake(2, [1], 9)],
    "recorded": [HEADER, REQUEST],
    "events": EVENTS,
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("before", ["\n", " \r\n\n", "\ufeff", "\ufeff\n"])
def test_blank_lines_and_a_mark_may_come_first(name: str, before: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "t", FIRST[name])
    expected = read_trace(file)
    file.write_text(before + file.read_text(), encoding="utf-8")
    assert read_trace(file) == expected


def published(events: list[list[Any]]) -> bytes:
    return b"".join(map(msgspec.msgpack.encode, events))


@pytest.mark.parametrize("name", [*FIRST, "msgpack"])
def test_a_trace_may_come_through_a_pipe(name: str, tmp_path: Path) -> None:
    file, pipe = tmp_path / "t", tmp_path / "pipe"
    if name == "msgpack":
        file.write_bytes(published(EVENTS))
    else:
        lines(file, FIRST[name])
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(file.read_bytes(),), daemon=True)
    writer.start()
    came = read_trace(pipe)
    writer.join()
    print(came)
    assert replace(came, source=str(file)) == read_trace(file)


def test_files_of_a_directory_without_a_first_line_are_left_out(tmp_path: Path) -> None:
    header = json.dumps(HEADER).encode()
    broken = {"1": b"", "2": header[:30], "3": header, "4": bytes(4096), "6": b"\n"}
    broken["7"] = json.dumps(REQUEST).encode() + b"\n"
    for name, text in broken.items():
        (tmp_path / f"trace-{name}.jsonl").write_bytes(text)
    with pytest.raises(TraceError, match="none of its files"):
        read_trace(tmp_path)
    lines(tmp_path / "trace-5.jsonl", [HEADER, REQUEST])
    trace = read_trace(tmp_path)
    print(*trace.notes, sep="\n")
    assert len(trace.requests) == 1
    assert len(trace.notes) == len(broken)
    for name, note in zip(broken, trace.notes, strict=True):
        assert note.startswith(f"{tmp_path}/trace-{name}.jsonl:")
        assert "left out" in note


def test_a_name_that_is_no_text_can_be_written(tmp_path: Path) -> None:
    file = lines(tmp_path / os.fsdecode(b"t\xff.jsonl"), FIRST["mooncake"])
    assert read_trace(file).source == f"{tmp_path}/t?.jsonl"


def test_a_file_that_is_not_there_and_a_directory_without_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"holds no trace; expected trace-\*\.jsonl"):
        read_trace(tmp_path)


def test_traces_of_two_engines_are_not_mixed(tmp_path: Path) -> None:
    lines(tmp_path / "trace-1.jsonl", [HEADER, REQUEST])
    lines(tmp_path / "trace-2.jsonl", [{**HEADER, "block_tokens": 32}, REQUEST])
    with pytest.raises(TraceError, match="other blocks, or under another secret"):
        read_trace(tmp_path)
