"""Where bits are flipped: places in a store's files, told by what lies there.

Blocks are found by their content, so that this knows next to nothing of how a store lays them out.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_kv.values import PAGE_BYTES

__all__ = ["Flip", "Places"]

_ENDS = 64
_META_PAGES = 2
_META_BYTES = 152
"""As much of a meta page as means something."""
_BRANCH, _LEAF = 0x01, 0x02
_BIG, _SUB = 0x01, 0x02
"""A node whose value lies in pages of its own; a node that names a tree."""
_PAGE_HEAD = struct.Struct("<QHHHH")
"""Number, padding, flags, lower and upper bound of the free room of an LMDB page."""
_NODE_HEAD = struct.Struct("<HHHH")
"""Low and high half of the value's length (in a branch: of the page below), flags, key's length."""
_NUMBER = struct.Struct("<Q")
_ROOTS_AT = (80, 128)
"""Where a meta page names the roots of its two trees."""
_TRANSACTION_AT = 144
_ROOT_IN_TREE = 40
_NO_PAGE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of one file."""

    place: str
    file: str
    """Below the store's directory."""
    offset: int
    bit: int
    block: int | None = None
    """The block whose bytes it lies in."""


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    block: int | None = None


class Places:
    """The places of one store, by name."""

    def __init__(self, root: Path, blocks: Mapping[int, bytes]) -> None:
        """Look through the files of a closed store that holds these blocks."""
        self._spans: dict[str, list[tuple[str, _Span]]] = {}
        found: set[int] = set()
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            if path.name == "data.mdb":
                found |= self._lmdb(name, path.read_bytes(), blocks)
            elif path.name.startswith("segment-"):
                found |= self._segment(name, path.read_bytes(), blocks)
        if found != set(blocks):
            raise RuntimeError(f"{len(found)} of {len(blocks)} blocks are found in {root}")

    def _add(self, place: str, file: str, spans: Sequence[_Span]) -> None:
        self._spans.setdefault(place, []).extend((file, span) for span in spans)

    @property
    def names(self) -> list[str]:
        """All places."""
        return sorted(self._spans)

    def draw(self, place: str, chance: random.Random) -> Flip:
        """A random bit of a place: spans are alike, so that page heads are as likely as pages."""
        file, span = chance.choice(self._spans[place])
        offset = chance.randrange(span.start, span.end)
        return Flip(place, file, offset, chance.randrange(8), span.block)

    def _segment(self, name: str, data: bytes, blocks: Mapping[int, bytes]) -> set[int]:
        spans = _found(data, blocks)
        first = min((span.start - _ENDS for span in spans), default=len(data))
        self._add("block bytes", name, spans)
        self._add("header page", name, [_Span(0, PAGE_BYTES)])
        if first > PAGE_BYTES:
            self._add("header table", name, [_Span(PAGE_BYTES, first)])
        if first < len(data):
            whole = [_Span(span.start - _ENDS, span.end + _ENDS) for span in spans]
            self._add("room between blocks", name, _gaps(whole, first, len(data)))
        return {span.block for span in spans if span.block is not None}

    def _lmdb(self, name: str, data: bytes, blocks: Mapping[int, bytes]) -> set[int]:
        what = "values" if name.startswith("values") else "index"
        pages, big = _reachable(data)
        # What was moved to another page when the file was left is there twice.
        spans = [one for one in _found(data, blocks) if (one.start - _ENDS) // PAGE_BYTES in big]
        if spans:
            self._add("block bytes", name, spans)
        metas = [_Span(page * PAGE_BYTES, page * PAGE_BYTES + _META_BYTES) for page in range(2)]
        trees = [_Span(page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in pages]
        self._add(f"{what}: trees", name, [*metas, *trees])
        for page in (0, 1, *pages, *big):
            self._add(f"{what}: page heads", name, _heads(data, page * PAGE_BYTES))
        return {span.block for span in spans if span.block is not None}


def _reachable(data: bytes) -> tuple[list[int], list[int]]:
    """Pages of all trees of an LMDB file as it was committed last, and those where large values
    begin."""
    newest = max(
        range(_META_PAGES),
        key=lambda page: _NUMBER.unpack_from(data, page * PAGE_BYTES + _TRANSACTION_AT)[0],
    )
    roots = [_NUMBER.unpack_from(data, newest * PAGE_BYTES + at)[0] for at in _ROOTS_AT]
    pages: list[int] = []
    big: list[int] = []
    while roots:
        page = int(roots.pop())
        if page == _NO_PAGE:
            continue
        pages.append(page)
        start = page * PAGE_BYTES
        flags = _PAGE_HEAD.unpack_from(data, start)[2]
        for node in _nodes(data, start):
            low, high, kind, key_bytes = _NODE_HEAD.unpack_from(data, node)
            value = node + _NODE_HEAD.size + key_bytes
            if flags & _BRANCH:
                roots.append(low | high << 16 | kind << 32)
            elif kind & _BIG:
                big.append(_NUMBER.unpack_from(data, value)[0])
            elif kind & _SUB:
                roots.append(_NUMBER.unpack_from(data, value + _ROOT_IN_TREE)[0])
    return pages, big


def _nodes(data: bytes, start: int) -> list[int]:
    """Where the nodes of a page begin."""
    _, _, flags, lower, _ = _PAGE_HEAD.unpack_from(data, start)
    if start < _META_PAGES * PAGE_BYTES or not flags & (_BRANCH | _LEAF):
        return []
    pointers = range(start + _PAGE_HEAD.size, start + lower, 2)
    return [start + int.from_bytes(data[at : at + 2], "little") for at in pointers]


def _found(data: bytes, blocks: Mapping[int, bytes]) -> list[_Span]:
    """Where blocks lie, but for their ends: a store may keep those elsewhere."""
    inner = {number: content[_ENDS:-_ENDS] for number, content in blocks.items()}
    spans = [
        _Span(at, at + len(content), number)
        for number, content in inner.items()
        for at in _all_places(data, content)
    ]
    return sorted(spans, key=lambda span: span.start)


def _all_places(data: bytes, content: bytes) -> Iterator[int]:
    at = data.find(content)
    while at >= 0:
        yield at
        at = data.find(content, at + 1)


def _gaps(spans: Sequence[_Span], start: int, end: int) -> list[_Span]:
    """The pages, or parts of pages, from `start` to `end` that hold nothing of a block."""
    gaps: list[_Span] = []
    for span in (*spans, _Span(end, end)):
        while start < span.start:
            stop = min(span.start, (start // PAGE_BYTES + 1) * PAGE_BYTES)
            gaps.append(_Span(start, stop))
            start = stop
        start = max(start, span.end)
    return gaps


def _heads(data: bytes, start: int) -> list[_Span]:
    """Head of a page, its array of pointers, and the heads of its nodes."""
    nodes = _nodes(data, start)
    end = start + _PAGE_HEAD.size
    heads = [_Span(start, end), *(_Span(node, node + _NODE_HEAD.size) for node in nodes)]
    return [*heads, _Span(end, end + 2 * len(nodes))] if nodes else heads
