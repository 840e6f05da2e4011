"""What the benchmarks are to reach: goals, the floors below them, and the table of all.

A floor is what a change may not fall below. It lies half-way between a peer (1) and the goal where
the goal is to beat the peer: `1 + (goal - 1) / 2`. Where the goal is a share of a limit that cannot
be passed, or a multiple of it that is to stay small, the floor allows twice the distance from the
limit: `1 + (goal - 1) * 2`, so 0.9 of fio's rate allows 0.8, and 1.5 times a warm cache's time
allows 2. Where the goal is a time in itself, the floor allows twice that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ROWS", "Goal", "Kind", "Row", "goal_of"]


class Kind(StrEnum):
    """How a goal is meant, which decides its floor."""

    AHEAD = "ahead"
    """At least so many times as good as a peer; above 1."""
    SHARE = "share"
    """At least this share of a limit; at most 1."""
    NEAR = "near"
    """At most so many times a limit; at least 1."""
    AMOUNT = "amount"
    """At most this amount, in the row's unit."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal."""

    value: float
    kind: Kind = Kind.AHEAD

    def __post_init__(self) -> None:
        allowed = {
            Kind.AHEAD: self.value >= 1,
            Kind.SHARE: 0.5 < self.value <= 1,
            Kind.NEAR: self.value >= 1,
            Kind.AMOUNT: self.value > 0,
        }
        if not allowed[self.kind]:
            raise ValueError(f"{self.value} is no goal of the kind {self.kind}")

    @property
    def at_most(self) -> bool:
        """Whether less is better."""
        return self.kind in (Kind.NEAR, Kind.AMOUNT)

    @property
    def floor(self) -> float:
        """What a change may not fall below (rise above, where less is better)."""
        if self.kind is Kind.AMOUNT:
            return 2 * self.value
        share = 0.5 if self.kind is Kind.AHEAD else 2.0
        return 1 + (self.value - 1) * share

    def met(self, value: float) -> bool:
        """Whether the goal is reached."""
        return value <= self.value if self.at_most else value >= self.value

    def kept(self, value: float) -> bool:
        """Whether the floor is."""
        return value <= self.floor if self.at_most else value >= self.floor

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    name: str
    """What benchmarks call it in their JSON."""
    title: str
    benchmark: str
    """Module below `tests.benchmarks` that measures it."""
    goals: Mapping[str, Goal]
    """By what it is measured at: a block size (`64 KiB`), or the empty string."""
    unit: str = "x"


def _sizes(*values: float, kind: Kind = Kind.AHEAD) -> dict[str, Goal]:
    sizes = ("64 KiB", "256 KiB", "1 MiB", "4 MiB")
    return {size: Goal(value, kind) for size, value in zip(sizes, values, strict=False)}


def _all_sizes(value: float, kind: Kind) -> dict[str, Goal]:
    return _sizes(*(4 * (value,)), kind=kind)


def _larger(value: float) -> dict[str, Goal]:
    return {size: Goal(value, Kind.SHARE) for size in ("256 KiB", "1 MiB", "4 MiB")}


def _one(value: float, kind: Kind = Kind.AHEAD) -> dict[str, Goal]:
    return {"": Goal(value, kind)}


ROWS = (
    Row(
        "nvme.store",
        "NVMe store, checksum on, vs one vLLM fs-tier job",
        "nvme_store",
        _sizes(6, 3, 2, 1.2),
    ),
    Row(
        "nvme.store.off",
        "NVMe store, checksum off, vs one vLLM fs-tier job",
        "nvme_store",
        {"4 MiB": Goal(1.5)},
    ),
    Row(
        "nvme.load",
        "NVMe load, verified, vs one vLLM fs-tier job",
        "nvme_store",
        _sizes(4, 2, 1.4, 1.0),
    ),
    Row(
        "nvme.store.16",
        "NVMe store, checksum on, vs 16 concurrent vLLM jobs",
        "nvme_store",
        _sizes(2, 1.7, 1.7, 1.1),
    ),
    Row(
        "nvme.store.16.off",
        "NVMe store, checksum off, vs 16 concurrent vLLM jobs",
        "nvme_store",
        {"4 MiB": Goal(1.5)},
    ),
    Row(
        "nvme.processor",
        "processor time per stored block vs vLLM's C extension, checksum off",
        "nvme_store",
        _sizes(10, 10, 10),
    ),
    Row(
        "nvme.fio.write",
        "NVMe store, checksum off, vs fio's median",
        "nvme_store",
        _all_sizes(0.9, Kind.SHARE),
    ),
    Row(
        "nvme.fio.read",
        "NVMe load, not verified, vs fio's median",
        "nvme_store",
        _all_sizes(0.9, Kind.SHARE),
    ),
    Row("lmdb.put", "LMDB put in steady state vs memcpy", "lmdb_store", _larger(0.95)),
    Row("lmdb.get", "LMDB get, not verified, vs memcpy", "lmdb_store", _larger(0.8)),
    Row(
        "lmcache.store",
        "NVMe store, checksum on, vs LMCache's local disk",
        "lmcache_disk",
        {"256 KiB": Goal(3)},
    ),
    Row(
        "lmcache.load",
        "NVMe load, verified, vs LMCache's local disk",
        "lmcache_disk",
        {"256 KiB": Goal(3)},
    ),
    Row(
        "seam.store",
        "engine + async seam vs the bare I/O engine, 256 blocks stored",
        "seam",
        {"256 KiB": Goal(0.95, Kind.SHARE)},
    ),
    Row(
        "seam.load",
        "engine + async seam vs the bare I/O engine, 256 blocks loaded",
        "seam",
        {"256 KiB": Goal(0.95, Kind.SHARE)},
    ),
    Row(
        "lookup.first",
        "lookup of a 1,024-key prefix, 1 M blocks indexed, the first time",
        "lookups",
        _one(0.5, Kind.AMOUNT),
        "ms",
    ),
    Row(
        "lookup.repeated",
        "the same, repeated in later steps",
        "lookups",
        _one(0.1, Kind.AMOUNT),
        "ms",
    ),
    Row(
        "lookup.vllm",
        "the same, vs vLLM's fs tier reaching all hit",
        "lookups",
        _one(10),
    ),
    Row(
        "token.recompute",
        "time to first token, 6,000 tokens: recompute / from NVMe after a restart",
        "first_token",
        _one(12),
    ),
    Row(
        "token.limit",
        "time to first token from NVMe / from vLLM's own warm prefix cache",
        "first_token",
        _one(1.5, Kind.NEAR),
    ),
    Row(
        "start.1GiB",
        "start with a host tier of 1 GiB, later than without tiered-kv by",
        "first_token",
        _one(3, Kind.AMOUNT),
        "s",
    ),
    Row(
        "start.8GiB",
        "start with a host tier of 8 GiB, later than without tiered-kv by",
        "first_token",
        _one(3, Kind.AMOUNT),
        "s",
    ),
    Row(
        "pool.resident",
        "host pool's resident size vs what was asked for",
        "bench_pool_start",
        {size: Goal(1.02, Kind.NEAR) for size in ("256 MiB", "2 GiB")},
    ),
)
"""All rows, in the order in which they are shown."""


def goal_of(name: str, at: str = "") -> Goal | None:
    """The goal of a row at a block size; None where it has none there."""
    for row in ROWS:
        if row.name == name:
            return row.goals.get(at)
    raise ValueError(f"there is no row {name!r}")
