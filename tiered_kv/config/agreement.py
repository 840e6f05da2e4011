"""Whether the parts of a deployment fit together: what no single field can tell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

__all__ = ["Disagreement", "disagreements"]


class _Tier(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def directories(self) -> dict[str, Path]: ...
    @property
    def writable(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One problem between fields."""

    loc: tuple[str | int, ...]
    """Where to mend it, as a key path."""
    message: str


def disagreements(
    tiers: Mapping[int, _Tier],
    write: Sequence[str] | None,
    other_names: frozenset[str] = frozenset(),
) -> list[Disagreement]:
    """Every problem between the tiers, and between them and the tiers to write to.

    `tiers` maps a tier's place in the file to its settings; tiers that are not valid by
    themselves may be left out and only their names given in `other_names`.
    """
    return [
        *_same_names(tiers),
        *_host_tiers(tiers),
        *_memory_names(tiers),
        *_directories(tiers),
        *_write(tiers, write or (), other_names),
    ]


def _same_names(tiers: Mapping[int, _Tier]) -> list[Disagreement]:
    first: dict[str, int] = {}
    found = []
    for place, tier in tiers.items():
        earlier = first.setdefault(tier.name, place)
        if earlier != place:
            found.append(
                Disagreement(
                    ("tiers", place, "name"),
                    f"tier {tier.name!r} is named twice (tiers.{earlier} and tiers.{place}); "
                    "give each tier a name of its own",
                )
            )
    return found


def _host_tiers(tiers: Mapping[int, _Tier]) -> list[Disagreement]:
    host = [(place, tier.name) for place, tier in tiers.items() if tier.type == "cpu"]
    return [
        Disagreement(
            ("tiers", place, "type"),
            f"tier {name!r} is a second cpu tier beside {host[0][1]!r}; there is one host pool, "
            "so add its capacity to the first",
        )
        for place, name in host[1:]
    ]


def _memory_names(tiers: Mapping[int, _Tier]) -> list[Disagreement]:
    """Routes and stats call the engine's cache "gpu" and the host pool "cpu"."""
    return [
        Disagreement(
            ("tiers", place, "name"),
            f"a tier of type {tier.type} cannot be named {tier.name!r}, which is a kind of memory; "
            "give it another name",
        )
        for place, tier in tiers.items()
        if tier.name == "gpu" or (tier.name == "cpu" and tier.type != "cpu")
    ]


def _directories(tiers: Mapping[int, _Tier]) -> list[Disagreement]:
    taken: list[tuple[Path, str]] = []
    found = []
    for place, tier in tiers.items():
        for key, directory in tier.directories.items():
            real = Path(os.path.realpath(directory))
            clash = _clash(real, taken)
            taken.append((real, tier.name))
            if clash is not None:
                loc = ("tiers", place, *(int(k) if k.isdigit() else k for k in key.split(".")))
                message = f"{directory} {clash}; give each tier a directory of its own"
                found.append(Disagreement(loc, message))
    return found


def _clash(real: Path, taken: Sequence[tuple[Path, str]]) -> str | None:
    for other, tier in taken:
        if real == other:
            return f"is also the directory of tier {tier!r}"
        if real.is_relative_to(other):
            return f"lies inside the directory of tier {tier!r} ({other})"
        if other.is_relative_to(real):
            return f"contains the directory of tier {tier!r} ({other})"
    return None


def _write(
    tiers: Mapping[int, _Tier], write: Sequence[str], other_names: frozenset[str]
) -> list[Disagreement]:
    by_name = {tier.name: tier for tier in tiers.values()}
    known = sorted(by_name.keys() | other_names)
    found = []
    for place, name in enumerate(write):
        loc = ("placement", "write", place)
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"the tiers are {', '.join(known)}"
            found.append(Disagreement(loc, f"there is no tier {name!r}; {hint}"))
        elif name in by_name and not by_name[name].writable:
            found.append(Disagreement(loc, f"tier {name!r} is read only; take it out of this list"))
        elif name in write[:place]:
            found.append(Disagreement(loc, f"tier {name!r} is named twice"))
    return found
