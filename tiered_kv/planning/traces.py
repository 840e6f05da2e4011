"""Traces of requests: which blocks of prompts were wanted, and when.

Three formats are read, told apart by their first bytes:

- the JSONL of the Mooncake project (`timestamp` in milliseconds, `input_length`, `output_length`,
  `hash_ids`: prefix blocks of 512 tokens, in order);
- what an engine of ours recorded (`trace` in its configuration): a file, or the directory;
- KV events of vLLM, see `tiered_kv.planning.kv_events`.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from tiered_kv.connector import TRACE_FORMAT, TRACE_VERSION, trace_files
from tiered_kv.errors import TraceError
from tiered_kv.placement import TracedRequest
from tiered_kv.planning.kv_events import EventReader, events_in
from tiered_kv.planning.quoting import MOST_COUNT, quoted

__all__ = ["MOONCAKE_BLOCK_TOKENS", "Trace", "TraceKind", "read_trace"]

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens of a block in the traces that the Mooncake project published."""

MOST_LINE_BYTES = 64 * 2**20
"""A longer line is no request."""


class TraceKind(StrEnum):
    """Where a trace comes from."""

    MOONCAKE = "mooncake"
    RECORDED = "recorded"
    KV_EVENTS = "vllm kv events"


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times."""

    source: str
    kind: TraceKind
    block_tokens: int
    """Tokens of a block."""
    requests: tuple[TracedRequest, ...]
    bytes_per_token: float | None = None
    """Of the engine that was recorded, over all of its ranks; None: not told."""
    recorded_hits: Mapping[str, int] = field(default_factory=dict)
    """Tokens that were found when it was recorded, by tier; `engine`: in the engine's own cache."""
    notes: tuple[str, ...] = ()
    """What a reader of figures made from it has to know."""

    @property
    def tokens(self) -> int:
        """Of all prompts."""
        return sum(request.tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].time - self.requests[0].time

    @property
    def whole_requests(self) -> bool:
        """Whether a request of the trace is a request of a client, whose time to the first token
        can be told."""
        return self.kind is not TraceKind.KV_EVENTS

    @property
    def distinct_blocks(self) -> int:
        """Blocks that would hold everything."""
        return len({key for request in self.requests for key in request.keys})


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Read a trace whole.

    Args:
        path: a file, which may be a pipe; or the directory that an engine of ours recorded in,
            whose files without a whole first line are left out with a note.
        block_tokens: tokens of a block, for a file in the Mooncake format whose blocks are not of
            512 tokens.

    Raises:
        TraceError: there is none, or a line of it is none of a trace; file and line are named.
    """
    if path.is_dir():
        return _directory(path)
    # Opened once, and read forward: it may be a pipe.
    with _opened(path) as stream:
        lines = _lines(stream)
        number, head = next(lines, (1, b""))
        if not head:
            raise TraceError(f"{path}:1: is empty; expected a trace")
        if head[0] >= 0x80:
            return _events(path, events_in(path, head + stream.read()))
        if not head.lstrip().startswith((b"{", b"[")):
            raise TraceError(f"{path}:{number}: is neither JSON nor msgpack: {_shown(head)}")
        first = _object(path, number, head)
        lines = chain([(number, head)], lines)
        if isinstance(first, list) or (isinstance(first, dict) and "events" in first):
            return _events(path, _batches(path, lines))
        if isinstance(first, dict) and first.get("format") == TRACE_FORMAT:
            recorded = _Recorded()
            recorded.take(path, lines)
            return recorded.trace(path)
        if isinstance(first, dict) and "hash_ids" in first:
            return _mooncake(path, lines, block_tokens or MOONCAKE_BLOCK_TOKENS)
    raise TraceError(
        f"{path}:{number}: is no trace: expected timestamp, input_length, output_length and "
        f'hash_ids (Mooncake), {{"format": "{TRACE_FORMAT}"}} (recorded by tiered-kv), or a batch '
        f"of KV events of vLLM ([ts, [events]])"
    )


def _directory(path: Path) -> Trace:
    files = trace_files(path)
    if not files:
        raise TraceError(
            f"{path}: holds no trace; expected trace-*.jsonl, as an engine writes them whose "
            "configuration has `trace`"
        )
    recorded = _Recorded()
    for file in files:
        with _opened(file) as stream:
            number, head = next(lines := _lines(stream), (1, b""))
            if not head:
                recorded.notes.append(f"{file}: is empty, and left out.")
            elif not _is_header(head):
                recorded.notes.append(
                    f"{file}:{number}: is not the whole first line of a recorded trace; the file "
                    "is left out."
                )
            else:
                recorded.take(file, chain([(number, head)], lines))
    if not recorded.headers:
        raise TraceError(
            f"{path}: none of its files trace-*.jsonl begins with the first line of a recorded "
            "trace; of other traces, give the file"
        )
    return recorded.trace(path)


def _is_header(line: bytes) -> bool:
    """Whether it is the whole first line of a file that an engine of ours recorded."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return False
    whole = line.endswith(b"\n")
    return whole and isinstance(values, dict) and values.get("format") == TRACE_FORMAT


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """A file to be read inside."""
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror or error}") from error


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line that is not empty, without a mark of its encoding (BOM)."""
    number = 0
    while line := stream.readline(MOST_LINE_BYTES):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if line.strip():
            yield number, line


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "replace").rstrip())


def _object(file: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file}:{number}: is not JSON ({error}): {_shown(line)}") from error


def _batches(file: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[str, Any]]:
    """Place and contents of each batch of events in JSON lines."""
    for number, line in lines:
        yield f"{file}:{number}", _object(file, number, line)


def _events(file: Path, batches: Iterator[tuple[str, Any]]) -> Trace:
    reader = EventReader(str(file))
    for place, batch in batches:
        reader.take(place, batch)
    requests = _ordered(reader.requests)
    if not requests:
        raise TraceError(f"{file}: tells of no stored block, so that there is nothing to plan from")
    return Trace(
        _named(file),
        TraceKind.KV_EVENTS,
        reader.block_tokens,
        requests,
        notes=tuple(reader.notes),
    )


def _ordered(requests: Sequence[TracedRequest]) -> tuple[TracedRequest, ...]:
    """By time; those of one time stay as they are."""
    return tuple(sorted(requests, key=lambda request: request.time))


def _named(path: Path) -> str:
    """Its name, as text that can be printed and written whatever bytes it has."""
    return str(path).encode("utf-8", "replace").decode("utf-8")


class _Fields:
    """The values of one line."""

    def __init__(self, place: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise TraceError(f"{place}: is no object with named values, but {quoted(values)}")
        self._place = place
        self._values = values

    def _get(self, name: str) -> Any:
        if name not in self._values:
            raise TraceError(f"{self._place}: {name} is missing")
        return self._values[name]

    def text(self, name: str) -> str:
        """A text."""
        value = self._get(name)
        if not isinstance(value, str):
            raise TraceError(f"{self._place}: {name} is {quoted(value)}, not a text")
        return value

    def number(self, name: str) -> float:
        """At least 0."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise TraceError(f"{self._place}: {name} is {quoted(value)}, not a number from 0 on")
        return float(value)

    def count(self, name: str) -> int:
        """A whole number of at least 0."""
        value = self.number(name)
        if value != int(value):
            raise TraceError(f"{self._place}: {name} is {quoted(value)}, not a whole number")
        if value > MOST_COUNT:
            raise TraceError(f"{self._place}: {name} is {quoted(value)}, more than {MOST_COUNT}")
        return int(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._get(name)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise TraceError(
                f"{self._place}: {name} is {quoted(value)}, not a list of whole numbers"
            )
        return tuple(value)

    def digests(self, name: str) -> tuple[int, ...]:
        """A list of digests in hexadecimal."""
        value = self._get(name)
        try:
            if isinstance(value, list):
                return tuple([int(item, 16) for item in value])
        except (TypeError, ValueError):
            pass
        raise TraceError(f"{self._place}: {name} is {quoted(value)}, not a list of digests in hex")

    def counts(self, name: str) -> dict[str, int]:
        """Whole numbers by name."""
        value = self._get(name)
        if not isinstance(value, dict):
            raise TraceError(f"{self._place}: {name} is {quoted(value)}, not numbers by name")
        inner = _Fields(f"{self._place}: {name}", value)
        return {key: inner.count(key) for key in value}


def _mooncake(file: Path, lines: Iterator[tuple[int, bytes]], block_tokens: int) -> Trace:
    requests: list[TracedRequest] = []
    for number, line in lines:
        place = f"{file}:{number}"
        fields = _Fields(place, _object(file, number, line))
        request = TracedRequest(
            fields.number("timestamp") / 1000,
            fields.integers("hash_ids"),
            fields.count("input_length"),
            fields.count("output_length"),
        )
        _check_length(place, request, block_tokens)
        requests.append(request)
    return Trace(_named(file), TraceKind.MOONCAKE, block_tokens, _ordered(requests))


def _check_length(place: str, request: TracedRequest, block_tokens: int) -> None:
    most = -(-request.tokens // block_tokens)
    if len(request.keys) > most:
        raise TraceError(
            f"{place}: {len(request.keys)} blocks for a prompt of {request.tokens} tokens, which "
            f"has {most} of {block_tokens} tokens; give the trace's own with --trace-block"
        )


class _Recorded:
    """What engines of ours recorded, read file by file."""

    def __init__(self) -> None:
        self.headers: set[tuple[int, float, str]] = set()
        self.notes: list[str] = []
        self._requests: list[TracedRequest] = []
        self._hits: Counter[str] = Counter()
        self._dropped = 0

    def take(self, file: Path, lines: Iterator[tuple[int, bytes]]) -> None:
        """Read a file's lines, the first of which is its header.

        Raises:
            TraceError: one of them is none of such a file.
        """
        block_tokens = 0
        for number, line in lines:
            place = f"{file}:{number}"
            if not line.endswith(b"\n"):
                self.notes.append(f"{place}: the last line is cut off, and left out.")
                break
            fields = _Fields(place, _object(file, number, line))
            if not block_tokens:
                header = _header(place, fields)
                self.headers.add(header)
                block_tokens = header[0]
                continue
            self._dropped += fields.count("dropped")
            request = TracedRequest(
                fields.number("time"),
                fields.digests("blocks"),
                fields.count("tokens"),
                fields.count("output_tokens"),
            )
            _check_length(place, request, block_tokens)
            self._requests.append(request)
            self._hits.update(fields.counts("hits"))

    def trace(self, path: Path) -> Trace:
        """All of it; `path` is its file or directory.

        Raises:
            TraceError: there is no request, or the files do not go together.
        """
        if len(self.headers) > 1:
            raise TraceError(
                f"{path}: its files were recorded by engines with other blocks, or under another "
                "secret, so that equal blocks have other names; give one file, or those of one "
                "engine"
            )
        if not self._requests:
            raise TraceError(f"{path}: holds no request yet; one is written when it is over")
        if self._dropped:
            self.notes.append(
                f"{self._dropped} further requests were not recorded, since the recorder was slow."
            )
        [(block_tokens, bytes_per_token, _)] = self.headers
        ordered = _ordered(self._requests)
        began = ordered[0].time
        return Trace(
            _named(path),
            TraceKind.RECORDED,
            block_tokens,
            tuple(replace(request, time=request.time - began) for request in ordered),
            bytes_per_token or None,
            dict(self._hits),
            tuple(self.notes),
        )


def _header(place: str, fields: _Fields) -> tuple[int, float, str]:
    version = fields.count("version")
    if version != TRACE_VERSION:
        raise TraceError(
            f"{place}: is of version {version} of the format; this tiered-kv reads {TRACE_VERSION}"
        )
    block_tokens = fields.count("block_tokens")
    if not block_tokens:
        raise TraceError(f"{place}: block_tokens is 0")
    bytes_per_token = fields.number("bytes_per_token")
    if 0 < bytes_per_token < 1:
        raise TraceError(f"{place}: bytes_per_token is {bytes_per_token!r}, less than a byte")
    return block_tokens, bytes_per_token, fields.text("secret")
