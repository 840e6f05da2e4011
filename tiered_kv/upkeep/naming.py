"""Telling namespaces apart, and finding one by the beginning of its id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from tiered_kv.values import Namespace

__all__ = [
    "NoSuchNamespace",
    "Resemblance",
    "differences",
    "find",
    "properties",
    "resemblances",
    "telling",
]

MOST_ALIKE = 4
"""Namespaces that differ in more fields than this are not told as alike."""


class NoSuchNamespace(LookupError):
    """No namespace has such an id, or several do; the text says which come near."""


@dataclass(frozen=True, slots=True)
class Resemblance:
    """A namespace, and the other one that comes nearest to it."""

    namespace: bytes
    """Its id."""
    other: bytes
    differences: tuple[tuple[str, str, str], ...]
    """(field, value here, value in the other), sorted by field; "" where one does not have it."""


def properties(namespace: Namespace) -> dict[str, str]:
    """Everything that tells a namespace: fields of its fingerprint, and `epoch` after a reset."""
    epoch = {"epoch": namespace.epoch.hex()} if namespace.epoch else {}
    return dict(namespace.fingerprint.fields) | epoch


def find(text: str, ids: Iterable[bytes]) -> bytes:
    """The one id whose hex begins with `text`.

    Raises:
        NoSuchNamespace: none or several do.
    """
    wanted = text.strip().lower()
    known = sorted({one.hex() for one in ids})
    found = [one for one in known if one.startswith(wanted)] if wanted else []
    if len(found) == 1:
        return bytes.fromhex(found[0])
    if found:
        raise NoSuchNamespace(f"{text!r} is the beginning of {_listed(found)}; give more digits")
    if not known:
        raise NoSuchNamespace(f"there is no namespace {text!r}; the tier holds none")
    near = wanted and get_close_matches(wanted, [one[: len(wanted)] for one in known], 1)
    if near:
        [first, *_] = [one for one in known if one.startswith(near[0])]
        raise NoSuchNamespace(f"there is no namespace {text!r}; did you mean {first}?")
    raise NoSuchNamespace(f"there is no namespace {text!r}; there are {_listed(known)}")


def telling(namespaces: Sequence[Namespace]) -> tuple[str, ...]:
    """The properties in which these namespaces differ, sorted."""
    each = [properties(namespace) for namespace in namespaces]
    names = sorted(set().union(*each))
    return tuple(name for name in names if len({one.get(name) for one in each}) > 1)


def resemblances(namespaces: Sequence[Namespace]) -> list[Resemblance]:
    """For each namespace the other that it shares most properties with, where they differ in few:
    why what is held for one is not found for the other. A pair is told once."""
    found: list[Resemblance] = []
    pairs: set[frozenset[bytes]] = set()
    for namespace in namespaces:
        others = [other for other in namespaces if other.id != namespace.id]
        nearest = min(
            ((differences(namespace, other), other.id) for other in others),
            key=lambda pair: (len(pair[0]), pair[1]),
            default=None,
        )
        if nearest is None or len(nearest[0]) > MOST_ALIKE:
            continue
        pair = frozenset({namespace.id, nearest[1]})
        if pair not in pairs:
            pairs.add(pair)
            found.append(Resemblance(namespace.id, nearest[1], nearest[0]))
    return found


def differences(one: Namespace, other: Namespace) -> tuple[tuple[str, str, str], ...]:
    """(field, value in the one, value in the other) where they differ, sorted by field; "" where
    one does not have it."""
    mine, theirs = properties(one), properties(other)
    names = sorted(mine.keys() | theirs.keys())
    return tuple(
        (name, mine.get(name, ""), theirs.get(name, ""))
        for name in names
        if mine.get(name) != theirs.get(name)
    )


def _listed(ids: Sequence[str]) -> str:
    most = 8
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return ", ".join(ids[:most]) + more
