"""`tiered-kv verify`: is everything that the tiers hold what was stored?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tiered_kv.cli.output import (
    FAILED,
    Config,
    Json,
    Tier,
    bytes_text,
    print_json,
    print_table,
    read_size,
)
from tiered_kv.cli.tending import NamespaceId, StoreTier, chosen, store_tiers, tend

if TYPE_CHECKING:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.contracts import BlockStore, Reconciliation, StoredNamespace
    from tiered_kv.values import BlockKey

__all__ = ["verify"]

Repair = Annotated[
    bool,
    typer.Option("--repair", help="Drop bad blocks, and put right what is wrong in the structure."),
]
Rate = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="SIZE",
        help="Read at most that much per second, for engines to go on beside it.",
        show_default=False,
    ),
]


@dataclass(slots=True)
class _Read:
    """What one rank's parts of the blocks of one namespace turned out to be."""

    namespace: str
    """Its id in hex."""
    rank: int
    blocks: int = 0
    bytes: int = 0
    corrupt: int = 0
    missing: int = 0
    """Evicted while we read, if somebody writes to the tier; else lost."""
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class _Verdict:
    structure: Reconciliation
    reads: Sequence[_Read]
    repaired: bool
    """Whether what is bad was dropped."""
    in_use: bool
    """Whether somebody writes to the tier, and may evict what was about to be read."""

    @property
    def left(self) -> dict[str, int]:
        """How much of each kind is wrong still."""
        wrong = self.structure.left
        wrong["corrupt blocks"] = 0 if self.repaired else sum(read.corrupt for read in self.reads)
        lost = not (self.in_use or self.repaired)
        wrong["missing blocks"] = sum(read.missing for read in self.reads) if lost else 0
        wrong["unreadable blocks"] = sum(read.unreadable for read in self.reads)
        return {kind: count for kind, count in wrong.items() if count}


def verify(
    config: Config,
    tier: Tier = None,
    namespace: NamespaceId = None,
    repair: Repair = False,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """Compare the index of each tier with what it names, then read every block of every rank and
    compare it with its checksum. Engines may run meanwhile.

    Exits 1 if anything is wrong that was not repaired.
    """
    from tiered_kv.cli.progress import Progress

    tiers = store_tiers(config, tier)
    for one in tiers if repair else ():
        one.require_writable("nothing in it can be repaired")
    pace = None if rate is None else _at_rate(read_size(rate))
    with Progress() as progress:
        looked_at = tend(tiers, lambda one: _look(one, repair, progress))
        wanted = {name: look.namespaces for name, look in looked_at.found.items()}
        if namespace is not None:
            wanted = {name: (stored,) for name, stored in chosen(wanted, namespace).items()}
        progress.expect(
            sum(one.blocks * one.geometry.world_size for many in wanted.values() for one in many)
        )
        tiers = [one for one in tiers if one.name in wanted or one.name in looked_at.failed]
        verdicts = tend(
            [one for one in tiers if one.name in wanted],
            lambda one: _verify(
                one, looked_at.found[one.name], wanted[one.name], repair, pace, progress
            ),
        )
    verdicts.failed.update(looked_at.failed)
    left = {name: verdict.left for name, verdict in verdicts.found.items() if verdict.left}
    if as_json:
        print_json(
            {
                "config": str(config),
                "ok": not (left or verdicts.failed),
                "tiers": verdicts.entries(tiers, _as_json),
            }
        )
    else:
        _print(verdicts.found)
        for name, wrong in left.items():
            listed = ", ".join(f"{count} {kind}" for kind, count in wrong.items())
            advice = "" if repair else "; --repair drops what is bad"
            typer.echo(f"tier {name}: {listed}{advice}", err=True)
    if left or verdicts.failed:
        raise typer.Exit(FAILED)


def _at_rate(bytes_per_second: int) -> Callable[[int], None]:
    """Sleeps so that no more is read per second than asked for."""
    from tiered_kv.upkeep import Pace

    pace = Pace(bytes_per_second)
    return lambda nbytes: time.sleep(pace.took(nbytes))


@dataclass(frozen=True, slots=True)
class _Look:
    """A tier's structure and what it holds."""

    structure: Reconciliation
    namespaces: Sequence[StoredNamespace]


def _look(tier: StoreTier, repair: bool, progress: Progress) -> _Look:
    from tiered_kv.contracts import Reconciliation

    if not tier.is_there:
        return _Look(Reconciliation(), ())
    progress.stage(f"tier {tier.name}: comparing the index with what it names")
    # To be repaired, it may have to be opened for writing before it can tell what it holds.
    with tier.maintenance(writable=repair) as maintenance:
        structure = maintenance.reconcile(repair=repair)
        return _Look(structure, tuple(maintenance.namespaces()))


def _verify(
    tier: StoreTier,
    look: _Look,
    wanted: Sequence[StoredNamespace],
    repair: bool,
    pace: Callable[[int], None] | None,
    progress: Progress,
) -> _Verdict:
    reads: list[_Read] = []
    for stored in wanted:
        for rank in range(stored.geometry.world_size):
            name = stored.namespace.id.hex()
            progress.stage(f"tier {tier.name}: reading namespace {name}, rank {rank}")
            reads.append(_read(tier, stored, rank, repair, pace, progress))
    in_use = any(stored.in_use for stored in look.namespaces)
    return _Verdict(look.structure, reads, repair, in_use)


def _read(
    tier: StoreTier,
    stored: StoredNamespace,
    rank: int,
    repair: bool,
    pace: Callable[[int], None] | None,
    progress: Progress,
) -> _Read:
    from tiered_kv.upkeep import verify as verify_blocks

    read = _Read(stored.namespace.id.hex(), rank)
    longest = max(group.block_bytes for group in stored.geometry.groups)
    with tier.store(stored, rank, writable=repair) as store:
        asked: list[BlockKey] = []
        keys = _noted(store.scan(), asked)
        for batch in verify_blocks(
            store, keys, rank=rank, block_bytes=longest, drop=repair, pace=pace
        ):
            read.blocks += batch.blocks
            read.bytes += batch.bytes
            read.corrupt += len(batch.corrupt)
            read.missing += batch.missing
            read.unreadable += batch.unreadable
            done = batch.blocks + batch.missing + batch.unreadable
            if repair and batch.missing:
                _drop_missing(store, asked, rank, longest)
            asked.clear()
            progress.advance(done, f"tier {tier.name}, rank {rank}")
    return read


def _noted(keys: Iterator[BlockKey], into: list[BlockKey]) -> Iterator[BlockKey]:
    for key in keys:
        into.append(key)
        yield key


def _drop_missing(store: BlockStore, keys: Sequence[BlockKey], rank: int, longest: int) -> None:
    """Drop the blocks of a batch that are listed and cannot be found: their rows are damaged, or
    lead nowhere. One that was evicted meanwhile is not there to be dropped."""
    from tiered_kv.upkeep import verify as verify_blocks

    for key in keys:
        for alone in verify_blocks(store, [key], rank=rank, block_bytes=longest, drop=False):
            if alone.missing:
                store.delete([key])


def _as_json(verdict: _Verdict) -> dict[str, Any]:
    return {
        "structure": {
            "found": dict(verdict.structure.found),
            "repaired": dict(verdict.structure.repaired),
        },
        "read": [asdict(read) for read in verdict.reads],
        "left": verdict.left,
    }


def _print(verdicts: Mapping[str, _Verdict]) -> None:
    columns = ("namespace", "rank", "blocks", "bytes", "corrupt", "missing", "unreadable")
    for name, verdict in verdicts.items():
        if not verdict.reads:
            typer.echo(f"tier {name}: no block was there to be read")
            continue
        print_table(
            f"Blocks of tier {name}",
            columns,
            (
                (
                    read.namespace,
                    str(read.rank),
                    str(read.blocks),
                    bytes_text(read.bytes),
                    str(read.corrupt),
                    str(read.missing),
                    str(read.unreadable),
                )
                for read in verdict.reads
            ),
            whole="namespace",
        )
    structure = [
        (name, kind, str(count), str(verdict.structure.repaired.get(kind, 0)))
        for name, verdict in verdicts.items()
        for kind, count in verdict.structure.found.items()
    ]
    if structure:
        print_table("Structure", ("tier", "what is wrong", "found", "repaired"), structure)
