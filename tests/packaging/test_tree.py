from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

_LONGEST = 500
_VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def _modules(source: Path) -> list[Path]:
    return [path for top in ("tiered_kv", "backends") for path in (source / top).rglob("*.py")]


def test_modules_stay_small(source: Path) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in _modules(source)}
    assert not {str(path): lines for path, lines in lengths.items() if lines > _LONGEST}


def test_modules_are_named_for_what_they_hold(source: Path) -> None:
    assert not [path for path in _modules(source) if path.stem.strip("_") in _VAGUE]


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    return {_normal(name): version for name, version in pins.items()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_locks_pin_every_dependency_within_its_bounds(
    source: Path, project: dict[str, Any]
) -> None:
    pins = _pins(source / ".ci" / "lock-engine.txt")
    requirements = map(Requirement, project["project"]["dependencies"])
    outside = [str(r) for r in requirements if pins.get(_normal(r.name), "") not in r.specifier]
    assert not outside


def test_locks_do_not_overlap(source: Path) -> None:
    engine, gates = (_pins(source / ".ci" / f"lock-{name}.txt") for name in ("engine", "gates"))
    assert not engine.keys() & gates.keys()
