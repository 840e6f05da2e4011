"""SIGKILL, again and again: the next start works and finds what was stored, and nothing grows."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.benchmarks.serving.figures import Figure
from tests.benchmarks.serving.servers import ask, prompt, server
from tests.engine.tiers import deployment
from tiered_kv.testing.conformance.blocks import disk_bytes

__all__ = ["run"]

KILLS = 5
MIB = 2**20
CAPACITY = 256 * MIB


def run(directory: Path, parsed: argparse.Namespace) -> list[Figure]:
    """Each server stores what the next one finds, and is killed while it stores more."""
    store = directory / "ssd"
    tiers = [
        {"name": "host", "type": "cpu", "capacity": "128MiB"},
        {"name": "ssd", "type": "nvme", "path": str(store), "capacity": f"{CAPACITY}B"},
    ]
    config = deployment(directory, tiers)
    found: list[int] = []
    sizes: list[int] = []
    shared: list[set[str]] = [_shared()]
    for life in range(KILLS + 1):
        with server(directory / f"life-{life}", config) as running:
            if life:
                running.settle()
                found.append(ask(running, prompt(life, 1000), 1).cached_tokens)
            ask(running, prompt(life + 1, 1000), 1)
            running.settle()
            ask(running, prompt(100 + life, 1000), 1)
            running.group.kill()
        shared.append(_shared())
        sizes.append(disk_bytes(store))
    ours = {name for name in shared[-1] - shared[0] if "tiered" in name or "kv" in name}
    return [
        Figure("kills", len(sizes)),
        Figure("starts that found what was stored before", sum(f > 900 for f in found), at_least=5),
        Figure("least that the disk held after a kill", min(sizes) / MIB, "MiB"),
        Figure("most that the disk held after a kill", max(sizes) / MIB, "MiB", at_most=256),
        Figure("files of ours in /dev/shm", len(ours), at_most=0),
        Figure("all files in /dev/shm, before and after", len(shared[-1]) - len(shared[0])),
    ]


def _shared() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}
