"""`tiered-kv import`: the blocks of an exported file into a tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.output import FAILED, Config, Json, bytes_text, print_json, warn
from tiered_kv.cli.tending import StoreTier, store_tiers
from tiered_kv.errors import ArchiveError, ConfigError, reason_in

if TYPE_CHECKING:
    from tiered_kv.contracts import BlockStore, StoredNamespace
    from tiered_kv.upkeep import ArchiveContents, ArchiveReader, Imported, ReadableStream
    from tiered_kv.values import CacheGeometry

__all__ = ["import_archive"]

PIPE = "-"

_BATCHES = 16
"""A batch is at most this part of the tier."""

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


def import_archive(
    config: Config, file: File, tier: Into, expect: Expect = None, as_json: Json = False
) -> None:
    """Store the blocks of an exported file in a tier, in the namespace that the file names. Each
    block is verified before it is stored; what is there is skipped. Engines may run meanwhile.

    Exits 1 if the file is damaged or the tier is full; what was stored before stays.
    """
    from tiered_kv.upkeep import ArchiveReader

    [target] = store_tiers(config, tier)
    target.require_writable("nothing can be imported")
    with _source(file) as stream:
        reader = ArchiveReader(stream)
        stored = _accept(reader.contents, target, expect)
        done, evicted = _import(reader, target, stored)
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


def _accept(contents: ArchiveContents, target: StoreTier, expect: str | None) -> StoredNamespace:
    """What is to be stored, if the tier does not know this namespace otherwise.

    Raises:
        ConfigError: it does, or another namespace is expected.
    """
    from tiered_kv.contracts import StoredNamespace

    name = contents.namespace.id.hex()
    if expect is not None and not (expect and name.startswith(expect.lower())):
        raise ConfigError(f"the file is of namespace {name}, and --expect says {expect}")
    for known in target.namespaces():
        if known.namespace.id == contents.namespace.id and known.geometry != contents.geometry:
            raise ConfigError(
                f"tier {target.name!r} holds namespace {name} with blocks of another shape than "
                f"the file: {_shape(known.geometry)} there, {_shape(contents.geometry)} here"
            )
    return StoredNamespace(contents.namespace, contents.geometry, 0, 0, in_use=False)


def _shape(geometry: CacheGeometry) -> str:
    groups = ", ".join(str(group.block_bytes) for group in geometry.groups)
    return f"{geometry.world_size} ranks, blocks of {groups} bytes"


def _import(
    reader: ArchiveReader, target: StoreTier, stored: StoredNamespace
) -> tuple[Imported, int]:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.upkeep import MOVE_BATCH_BYTES, import_blocks

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
            batch_bytes=max(1, min(MOVE_BATCH_BYTES, target.settings.capacity // _BATCHES)),
            progress=lambda parts: progress.advance(parts, f"tier {target.name}"),
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
