"""`tiered-kv import`: the blocks of an exported file into a tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.acceptance import accept
from tiered_kv.cli.output import FAILED, Config, Json, bytes_text, print_json, read_size, warn
from tiered_kv.cli.tending import StoreTier, store_tiers
from tiered_kv.errors import ArchiveError, ConfigError, reason_in

if TYPE_CHECKING:
    from tiered_kv.contracts import BlockStore, StoredNamespace
    from tiered_kv.upkeep import ArchiveContents, ArchiveReader, Imported, ReadableStream

__all__ = ["import_archive"]

PIPE = "-"

File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="What `export` wrote, or - for stdin.", show_default=False),
]
Into = Annotated[
    str, typer.Option("--tier", metavar="NAME", help="The tier to store in.", show_default=False)
]
Expect = Annotated[
    str | None,
    typer.Option(
        "--expect",
        metavar="ID",
        help="Refuse a file of another namespace than the one whose id begins so.",
        show_default=False,
    ),
]

NewNamespace = Annotated[
    bool,
    typer.Option(
        "--new-namespace",
        help="Store it also beside namespaces of other fingerprints, for an engine to come.",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="SIZE", help="Most bytes per second.", show_default=False),
]


def import_archive(
    config: Config,
    file: File,
    tier: Into,
    expect: Expect = None,
    new_namespace: NewNamespace = False,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """Store the blocks of an exported file in a tier, in the namespace that the file names. Each
    block is verified before it is stored; what is there is skipped. Engines may run meanwhile.

    A file of another fingerprint than that of the engines which used the tier is refused: they
    would not find its blocks.

    Exits 1 if the file is damaged or the tier is full; what was stored before stays.
    """
    from tiered_kv.upkeep import ArchiveReader

    bytes_per_second = None if rate is None else read_size(rate)
    [target] = store_tiers(config, tier)
    target.require_writable("nothing can be imported")
    with _source(file) as stream:
        reader = ArchiveReader(stream)
        stored = _accept(reader.contents, target, expect, new=new_namespace)
        done, evicted = _import(reader, target, stored, bytes_per_second)
    _tell(done, evicted, reader, target, file, as_json=as_json)
    if done.refused:
        warn(f"{done.refused} parts of blocks are damaged in {file} and were not stored")
    if done.damage:
        warn(f"{file}: {done.damage}; what was stored before was verified, and stays")
    if done.full:
        why = reason_in(tier, done.full)
        warn(f"tier {tier!r} is full, the rest of {file} was not stored: {why}")
    if done.refused or done.damage or done.full:
        raise typer.Exit(FAILED)


def _accept(
    contents: ArchiveContents, target: StoreTier, expect: str | None, *, new: bool
) -> StoredNamespace:
    name = contents.namespace.id.hex()
    if expect is not None and not (expect and name.startswith(expect.lower())):
        raise ConfigError(f"the file is of namespace {name}, and --expect says {expect}")
    # Who says which namespace it must be needs not be told that it is a new one.
    new = new or expect is not None
    return accept(contents.namespace, contents.geometry, target, source="the file", new=new)


def _import(
    reader: ArchiveReader, target: StoreTier, stored: StoredNamespace, rate: int | None
) -> tuple[Imported, int]:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.cli.warm_copy import paced
    from tiered_kv.upkeep import batch_into, import_blocks

    opened: dict[int, BlockStore] = {}
    with ExitStack() as stack:
        progress = stack.enter_context(Progress())

        def store_of(rank: int) -> BlockStore:
            if rank not in opened:
                opened[rank] = stack.enter_context(target.store(stored, rank, writable=True))
            return opened[rank]

        progress.stage(f"tier {target.name}: importing {stored.namespace.id.hex()}")
        done = import_blocks(
            reader,
            store_of,
            batch_bytes=batch_into(target.settings.capacity),
            progress=lambda parts: progress.advance(parts, f"tier {target.name}"),
            pace=paced(rate),
        )
        return done, sum(store.stat().evicted_blocks for store in opened.values())


def _tell(
    done: Imported,
    evicted: int,
    reader: ArchiveReader,
    target: StoreTier,
    file: str,
    *,
    as_json: bool,
) -> None:
    if as_json:
        print_json(
            {
                "file": file,
                "tier": target.name,
                "namespace": reader.contents.namespace.id.hex(),
                "ranks": list(reader.contents.ranks),
                **asdict(done),
                "evicted_blocks": evicted,
            }
        )
        return
    made_room = f", {evicted} blocks evicted for it" if evicted else ""
    typer.echo(
        f"{done.parts} parts of blocks, {bytes_text(done.bytes)}, stored in tier {target.name}; "
        f"{done.present} were there already{made_room}"
    )


@contextmanager
def _source(file: str) -> Iterator[ReadableStream]:
    with ExitStack() as stack:
        try:
            source = os.dup(0) if file == PIPE else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            stream = stack.enter_context(os.fdopen(source, "rb"))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ConfigError(f"there is no file {file}") from error
        except OSError as error:
            raise ArchiveError(f"cannot read {file}: {error}") from error
        yield stream
