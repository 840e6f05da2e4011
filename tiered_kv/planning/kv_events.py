"""KV events of vLLM as a trace.

An event tells which blocks entered a cache of the engine, with the block before them, and which
left it. So it tells what the engine had to compute (or load) because its own cache did not hold it:
what further tiers would have been asked for. It does not tell what the engine found in its own
cache, where one request ends and the next begins, nor which of the blocks are of answers: those
count as computed here, so that hit rates are on the low side, and no time to the first token can be
told.

Files: JSONL of batches (`msgspec.json.encode`), or batches in msgpack as they are published, one
behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiered_kv.errors import TraceError
from tiered_kv.placement import TracedRequest
from tiered_kv.planning.quoting import quoted

__all__ = ["EventReader", "events_in"]

ENGINE_MEDIUM = "GPU"
"""Events of other media are of tiers, which are what is planned here."""

MOST_SECONDS = 1e18
"""Of a time; nanoseconds of our days are less."""

MOST_BLOCK_TOKENS = 2**20

UNTOLD = (
    "KV events tell what the engine stored in its own cache: its own hits, the limits of requests "
    "and which blocks are of answers are not in them. So hit rates are a lower bound, and the time "
    "to the first token cannot be told."
)


class EventReader:
    """Makes requests of batches: each run of blocks that were stored behind one another is one."""

    def __init__(self, source: str) -> None:
        """`source` names the file in messages."""
        self._source = source
        self._keys: dict[str, int] = {}
        self.requests: list[TracedRequest] = []
        self.block_tokens = 0
        """Tokens of a block; 0 before the first one."""
        self._removed = 0
        self._other_media = 0
        self._other_groups = 0
        self._began: float | None = None

    def take(self, place: str, batch: Any) -> None:
        """Read a batch that stands at `place` (file and line).

        Raises:
            TraceError: it is none.
        """
        if isinstance(batch, dict):
            batch = [batch.get("ts"), batch.get("events")]
        if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
            raise TraceError(f"{place}: is no batch of events, [seconds, [events], ...]")
        time = batch[0]
        known = isinstance(time, int | float) and not isinstance(time, bool)
        if not known or not abs(time) < MOST_SECONDS:
            raise TraceError(f"{place}: its time is {quoted(time)}, not a number of seconds")
        if self._began is None:
            self._began = time
        for event in batch[1]:
            if not isinstance(event, dict):
                raise TraceError(f"{place}: {quoted(event)} is no event with a type")
            self._event(place, max(0.0, time - self._began), event)

    def _event(self, place: str, time: float, event: dict[str, Any]) -> None:
        kind = event.get("type")
        if kind in ("BlockRemoved", "AllBlocksCleared"):
            self._removed += 1
            return
        if kind != "BlockStored":
            raise TraceError(
                f"{place}: an event of the type {quoted(kind)}; expected BlockStored, BlockRemoved "
                "or AllBlocksCleared, as vLLM 0.32 publishes them"
            )
        if event.get("medium") not in (None, ENGINE_MEDIUM):
            self._other_media += 1
            return
        if event.get("group_idx"):  # the same tokens once more, in another KV group
            self._other_groups += 1
            return
        hashes, size = event.get("block_hashes"), event.get("block_size")
        if not isinstance(hashes, list) or type(size) is not int:
            raise TraceError(f"{place}: BlockStored needs block_hashes and block_size")
        if not 0 < size <= MOST_BLOCK_TOKENS:
            raise TraceError(
                f"{place}: block_size is {quoted(size)}, not 1 to {MOST_BLOCK_TOKENS} tokens"
            )
        if self.block_tokens not in (0, size):
            raise TraceError(
                f"{place}: a block of {size} tokens after blocks of {self.block_tokens}; give the "
                "events of one engine"
            )
        self.block_tokens = size
        keys = tuple([self._key(place, name) for name in hashes])
        if keys:
            self.requests.append(TracedRequest(time, keys, len(keys) * size, 0))

    def _key(self, place: str, name: Any) -> int:
        if isinstance(name, bytes):
            name = name.hex()
        if isinstance(name, bool) or not isinstance(name, int | str):
            raise TraceError(f"{place}: {quoted(name)} is no hash of a block")
        return self._keys.setdefault(str(name), len(self._keys))

    @property
    def notes(self) -> list[str]:
        """What was left out, and what the events cannot tell."""
        notes = [UNTOLD]
        for count, what in (
            (self._removed, "events of removed blocks need no replay"),
            (self._other_media, "events are of other media than the engine's own cache"),
            (self._other_groups, "events are of further KV groups"),
        ):
            if count:
                notes.append(f"Left out: {count} {what}.")
        return notes


def events_in(file: Path, contents: bytes) -> Iterator[tuple[str, Any]]:
    """Place and contents of each batch of a file in msgpack.

    Raises:
        TraceError: msgspec is not installed; or it is no msgpack.
    """
    try:
        import msgspec  # noqa: PLC0415 - comes with vLLM, and is needed for this format alone
    except ImportError as error:
        raise TraceError(
            f"{file}: is no JSON, and to read msgpack the package msgspec is needed (vLLM brings "
            "it); install it, or give the events as JSON lines"
        ) from error
    data = memoryview(contents)
    at = number = 0
    while at < len(data):
        number += 1
        place = f"{file}: batch {number} at byte {at}"
        try:
            end = _end(data, at)
            batch = msgspec.msgpack.decode(data[at:end])
        except (IndexError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise TraceError(
                f"{place}: is neither JSON nor msgpack, or is cut off ({error})"
            ) from error
        yield place, batch
        at = end


_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""Bytes of the length that follows the first byte of bytes, texts and extensions ..."""
_ITEMS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""... of arrays and maps, with the values per item ..."""
_PLAIN = {
    **dict.fromkeys((0xC0, 0xC2, 0xC3), 0),
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    0xD4: 2,
    0xD5: 3,
    0xD6: 5,
    0xD7: 9,
    0xD8: 17,
}
"""... and those of values of one size. (The specification of msgpack, "Formats".)"""


def _end(data: memoryview, at: int) -> int:
    """Where the value that begins at `at` ends: msgspec decodes one value at a time, and does not
    say how long it was.

    Raises:
        IndexError: the data ends before.
        ValueError: no value begins there.
    """
    left = 1
    while left:
        left -= 1
        kind = data[at]
        at += 1
        if kind < 0x80 or kind >= 0xE0:
            continue
        if kind < 0xA0:
            left += (kind & 0x0F) * (1 if kind >= 0x90 else 2)
        elif kind < 0xC0:
            at += kind & 0x1F
        elif kind in _SIZES:
            width = _SIZES[kind]
            at += width + int.from_bytes(data[at : at + width], "big") + (0xC7 <= kind <= 0xC9)
        elif kind in _ITEMS:
            width, values = _ITEMS[kind]
            left += int.from_bytes(data[at : at + width], "big") * values
            at += width
        elif kind in _PLAIN:
            at += _PLAIN[kind]
        else:
            raise ValueError(f"no value begins with {kind:#04x}")
    if at > len(data):
        raise IndexError("it ends in the middle of a value")
    return at
