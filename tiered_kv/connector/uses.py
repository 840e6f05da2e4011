"""Which blocks requests want, told to the host tier's policy once for each request and block, and
how they hang together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tiered_kv.connector.books import Books
from tiered_kv.connector.requests import RequestState
from tiered_kv.values import BlockKey

__all__ = ["note_lookup", "note_store"]


def note_lookup(
    books: Books, state: RequestState, keys: Sequence[BlockKey], tokens: int | None
) -> None:
    """A request asks for all its whole blocks, group by group; `tokens` it has."""
    if books.catalog is not None:
        for row in _rows(books, keys, tokens):
            _note(books, state, row)


def note_store(books: Books, state: RequestState, keys: Sequence[BlockKey]) -> None:
    """A request has blocks to store: those that it did not ask for go on where those end.

    With several KV groups nothing tells which of them a block belongs to, so that none is known to
    need another one.
    """
    if books.catalog is None or books.geometry is None:
        return
    new = [key for key in keys if key not in state.parents]
    if not new:
        return
    if len(books.geometry.groups) == 1:
        known = next(reversed(state.parents), None)
        _note(books, state, new if known is None else [known, *new])
    else:
        state.parents.update(dict.fromkeys(new))
        books.catalog.wanted(new)


def _rows(
    books: Books, keys: Sequence[BlockKey], tokens: int | None
) -> Iterator[Sequence[BlockKey]]:
    groups = () if books.geometry is None else books.geometry.groups
    if len(groups) == 1:
        yield keys
    elif tokens is not None and len(keys) == sum(tokens // group.tokens for group in groups):
        start = 0
        for group in groups:
            yield keys[start : start + tokens // group.tokens]
            start += tokens // group.tokens


def _note(books: Books, state: RequestState, row: Sequence[BlockKey]) -> None:
    if not row or row[-1] in state.parents:
        return
    new, parents = row, state.parents
    if parents:
        new = [key for key in row if key not in parents]
        for before, key in zip((None, *row), row, strict=False):
            parents.setdefault(key, before)
    else:
        parents.update(zip(row, (None, *row), strict=False))
    if books.catalog is not None:
        books.catalog.wanted(new)
