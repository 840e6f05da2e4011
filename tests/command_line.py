"""Runs the command line in the process of the test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tiered_kv.cli import main

__all__ = ["Cli", "Ran", "cli"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Ran]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `tiered-kv` with these arguments. What the test printed before stays the test's."""

    def run(*arguments: str | Path) -> Ran:
        printed = capsys.readouterr().out
        monkeypatch.setattr(sys, "argv", ["tiered-kv", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        print(printed, end="")
        return Ran(code, captured.out, captured.err)

    return run
