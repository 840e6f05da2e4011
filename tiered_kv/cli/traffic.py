"""What engines and tiers moved, from their statistics: as values, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tiered_kv.cli.output import bytes_text, print_table
from tiered_kv.stats import HopStats, StatsSnapshot
from tiered_kv.values import CPU, GPU

__all__ = ["Traffic", "loaded_bytes", "tiers_that_supplied", "traffic"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moved into and out of the tiers of a deployment."""

    tiers: Mapping[str, str]
    """Type of each tier by its name, nearest first."""
    stats: StatsSnapshot

    def hops(self) -> dict[str, HopStats]:
        """By `gpu->cpu`, `cpu->ssd`, ...: media, and tiers by their names."""
        return {_label(*hop): moved for hop, moved in self.stats.hops().items()}

    def loaded(self, tier: str) -> HopStats:
        """What the hops out of a tier brought."""
        if self.tiers[tier] == CPU:
            staged = _sum(
                moved
                for (src, dst, _), moved in self.stats.hops().items()
                if src not in (CPU, GPU) and dst == CPU
            )
            return _without(self.stats.hop(CPU, GPU, CPU), staged)
        return _sum(
            moved
            for (src, _, name), moved in self.stats.hops().items()
            if name == tier and src not in (CPU, GPU)
        )

    def stored(self, tier: str) -> HopStats:
        """What the hops into a tier brought."""
        if self.tiers[tier] == CPU:
            return self.stats.hop(GPU, CPU, CPU)
        return _sum(
            moved
            for (_, dst, name), moved in self.stats.hops().items()
            if name == tier and dst not in (CPU, GPU)
        )

    def tiers_as_json(self) -> dict[str, Any]:
        """By tier: what was loaded from it, what was stored in it, and what it holds."""
        result: dict[str, Any] = {}
        for name, kind in self.tiers.items():
            held = self.stats.tier(name)
            result[name] = {
                "type": kind,
                **_as_json(self.loaded(name)),
                "stored": _as_json(self.stored(name)),
                "resident_blocks": held.resident_blocks,
                "evicted_blocks": held.evicted,
                "dropped_blocks": dict(held.dropped),
            }
        return result

    def hops_as_json(self) -> dict[str, Any]:
        """By hop."""
        return {label: _as_json(moved) for label, moved in self.hops().items()}

    def print_tables(self) -> None:
        """Blocks and bytes by tier and by hop, to stdout."""
        print_table(
            "Blocks by tier",
            ("tier", "type", "stored", "", "loaded", "", "evicted", "dropped", "failed"),
            (
                (
                    name,
                    kind,
                    *_blocks_and_bytes(self.stored(name)),
                    *_blocks_and_bytes(self.loaded(name)),
                    str(self.stats.tier(name).evicted),
                    str(sum(self.stats.tier(name).dropped.values())),
                    str(_failures(self.stored(name)) + _failures(self.loaded(name))),
                )
                for name, kind in self.tiers.items()
            ),
        )
        print_table(
            "Blocks by hop",
            ("hop", "blocks", "bytes", "calls", "seconds in calls", "failed"),
            (
                (
                    label,
                    *_blocks_and_bytes(moved),
                    str(moved.operations),
                    f"{moved.seconds:.3f}",
                    str(_failures(moved)),
                )
                for label, moved in self.hops().items()
            ),
        )


def traffic(tiers: Mapping[str, str], *stats: StatsSnapshot) -> Traffic:
    """What several engines did, one after another."""
    [first, *others] = stats
    for other in others:
        first = first.merge(other)
    return Traffic(tiers, first)


def loaded_bytes(
    tiers: Mapping[str, str], before: StatsSnapshot, after: StatsSnapshot
) -> dict[str, int]:
    """Bytes that each tier supplied between two readings of one engine."""
    earlier, later = Traffic(tiers, before), Traffic(tiers, after)
    return {name: later.loaded(name).bytes - earlier.loaded(name).bytes for name in tiers}


def tiers_that_supplied(loaded: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the tiers with any bytes in the result of `loaded_bytes`."""
    return tuple(name for name, size in loaded.items() if size > 0)


def _label(src: str, dst: str, tier: str) -> str:
    source, destination = (name if name in (CPU, GPU) else tier for name in (src, dst))
    return f"{source}->{destination}"


def _sum(parts: Iterable[HopStats]) -> HopStats:
    total = HopStats()
    for part in parts:
        reasons = dict.fromkeys((*total.failures, *part.failures))
        total = HopStats(
            operations=total.operations + part.operations,
            blocks=total.blocks + part.blocks,
            bytes=total.bytes + part.bytes,
            seconds=total.seconds + part.seconds,
            failures={r: total.failures.get(r, 0) + part.failures.get(r, 0) for r in reasons},
        )
    return total


def _without(whole: HopStats, part: HopStats) -> HopStats:
    """Of what was copied to the engine, that which came from no lower tier.

    Calls, seconds and failures of the copy cannot be told apart and stay as they are.
    """
    return HopStats(
        operations=whole.operations,
        blocks=max(0, whole.blocks - part.blocks),
        bytes=max(0, whole.bytes - part.bytes),
        seconds=whole.seconds,
        failures=whole.failures,
    )


def _failures(moved: HopStats) -> int:
    return sum(moved.failures.values())


def _blocks_and_bytes(moved: HopStats) -> tuple[str, str]:
    return f"{moved.blocks} blocks", bytes_text(moved.bytes)


def _as_json(moved: HopStats) -> dict[str, Any]:
    return {
        "blocks": moved.blocks,
        "bytes": moved.bytes,
        "seconds": moved.seconds,
        "failures": _failures(moved),
    }
