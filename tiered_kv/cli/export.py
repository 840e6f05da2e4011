"""`tiered-kv export`: the blocks of a namespace into one file, or into a pipe."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiered_kv.cli.output import FAILED, Config, Json, bytes_text, read_size, warn
from tiered_kv.cli.tending import StoreTier, chosen, store_tiers
from tiered_kv.errors import ArchiveError, ConfigError

if TYPE_CHECKING:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.contracts import StoredNamespace
    from tiered_kv.upkeep import Exported, WritableStream

__all__ = ["export"]

PIPE = "-"

File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="A new file, or - for stdout.", show_default=False),
]
From = Annotated[
    str, typer.Option("--tier", metavar="NAME", help="The tier to read.", show_default=False)
]
Which = Annotated[
    str,
    typer.Option(
        "--namespace",
        metavar="ID",
        help="Id of the namespace, as `ls` shows it; its beginning is enough.",
        show_default=False,
    ),
]
Limit = Annotated[
    str | None,
    typer.Option(
        "--limit",
        metavar="SIZE",
        help="Most bytes of blocks in the file, with a unit.",
        show_default=False,
    ),
]
Rank = Annotated[
    int | None,
    typer.Option(
        "--rank", min=0, help="Only this rank's parts; by default all ranks'.", show_default=False
    ),
]

Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="SIZE", help="Most bytes per second.", show_default=False),
]


def export(
    config: Config,
    file: File,
    tier: From,
    namespace: Which,
    limit: Limit = None,
    rank: Rank = None,
    rate: Rate = None,
    as_json: Json = False,
) -> None:
    """Write the blocks of a namespace to one file that tells everything needed to import it, the
    most used first. Each block is verified before it is written. Engines may run meanwhile.

    Exits 1 if blocks were left out because they are damaged, or if --limit leaves room for none.
    """
    from tiered_kv.cli.output import print_json
    from tiered_kv.cli.progress import Progress

    most_bytes = None if limit is None else read_size(limit)
    bytes_per_second = None if rate is None else read_size(rate)
    [source] = store_tiers(config, tier)
    stored = chosen({tier: source.namespaces()}, namespace)[tier]
    ranks = _ranks(stored, rank)
    # Around the target, so that SIGTERM leaves no part of a file at any time.
    with Progress(stored.blocks * len(ranks)) as progress, _target(file) as stream:
        done = _export(source, stored, ranks, stream, progress, most_bytes, bytes_per_second)
        bad = done.corrupt + done.unreadable
        if limit is not None and stored.blocks and not (done.blocks or bad or done.missing):
            raise ArchiveError(f"no block of {len(ranks)} ranks fits into --limit {limit}")
    to_pipe = file == PIPE
    if as_json:
        said = {
            "file": file,
            "tier": tier,
            "namespace": stored.namespace.id.hex(),
            "ranks": list(ranks),
            **asdict(done),
        }
        if to_pipe:
            import json

            typer.echo(json.dumps(said), err=True)
        else:
            print_json(said)
    else:
        left_out = f", {done.missing} evicted meanwhile" if done.missing else ""
        typer.echo(
            f"{done.blocks} blocks of {len(ranks)} ranks, {bytes_text(done.bytes)}, written to "
            f"{'stdout' if to_pipe else file}{left_out}",
            err=to_pipe,
        )
    if bad:
        warn(
            f"{bad} blocks are left out: {done.corrupt} damaged, {done.unreadable} unreadable; "
            f"`tiered-kv verify` with --repair drops them"
        )
        raise typer.Exit(FAILED)


def _ranks(stored: StoredNamespace, rank: int | None) -> tuple[int, ...]:
    ranks = range(stored.geometry.world_size)
    if rank is None:
        return tuple(ranks)
    if rank not in ranks:
        raise ConfigError(
            f"--rank: namespace {stored.namespace.id.hex()} has ranks 0 to {ranks[-1]}, not {rank}"
        )
    return (rank,)


def _export(
    source: StoreTier,
    stored: StoredNamespace,
    ranks: tuple[int, ...],
    stream: WritableStream,
    progress: Progress,
    most_bytes: int | None,
    rate: int | None,
) -> Exported:
    from tiered_kv.cli.warm_copy import paced
    from tiered_kv.upkeep import ArchiveContents, ArchiveWriter, export_blocks, most_used_first

    contents = ArchiveContents(stored.namespace, stored.geometry, ranks)
    with ExitStack() as stack:
        stores = {rank: stack.enter_context(source.store(stored, rank)) for rank in ranks}
        progress.stage(f"tier {source.name}: exporting {stored.namespace.id.hex()}")
        return export_blocks(
            stores,
            most_used_first(stores[ranks[0]]),
            ArchiveWriter(stream, contents),
            block_bytes=contents.block_bytes,
            most_bytes=most_bytes,
            progress=lambda parts: progress.advance(parts, f"tier {source.name}"),
            pace=paced(rate),
        )


@contextmanager
def _target(file: str) -> Iterator[WritableStream]:
    """The stream to write to. A file gets its name when it is whole: a name is never that of half
    an archive."""
    if file == PIPE:
        if sys.stdout.isatty():
            raise ConfigError("an archive is no text for a terminal; name a file, or give a pipe")
        with _translated("stdout"), os.fdopen(os.dup(1), "wb") as stream:
            yield stream
        return
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name a new file in it")
    if path.exists() and not path.is_file():  # a named pipe, a device
        with _translated(file), path.open("wb") as stream:
            yield stream
        return
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already; name a new file, or remove it")
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    problem: OSError | None = None
    with _translated(file):
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            problem = _name(part, path)
        finally:
            if problem is None:
                part.unlink(missing_ok=True)
    if problem is not None:
        raise ArchiveError(
            f"the archive is whole, but cannot be named {path}: {problem}; it is kept as {part}, "
            "rename or remove it"
        )


def _name(part: Path, path: Path) -> OSError | None:
    """Give a whole file its name, as a rename that replaces nothing; why that cannot be done."""
    try:
        os.link(part, path)
    except FileExistsError as error:
        return error
    except OSError:
        return _name_by_rename(part, path)
    return None


def _name_by_rename(part: Path, path: Path) -> OSError | None:
    """The same on file systems without hard links: takes the name by an empty file before."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error
    try:
        part.replace(path)
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError):
            return error
        raise
    return None


@contextmanager
def _translated(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"cannot write {file}: {error}") from error
