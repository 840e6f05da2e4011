"""`tiered-kv warm --from`: blocks of another store into tiers, without an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tiered_kv.cli.acceptance import accept
from tiered_kv.cli.output import FAILED, bytes_text, print_json, warn
from tiered_kv.cli.tending import StoreTier, chosen, store_tiers
from tiered_kv.cli.warm_deployment import tiers_to_warm
from tiered_kv.cli.warm_keep import Keeping, Kept, keep, kept_text, require_keeper, require_keeping
from tiered_kv.cli.warming import duration_text
from tiered_kv.errors import ConfigError, reason_in

if TYPE_CHECKING:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.contracts import StoredNamespace
    from tiered_kv.upkeep import Copied

__all__ = ["Copying", "copy_blocks_of", "paced"]

MARKER = "tiered-kv.json"
"""By this file the directory of a store is known."""


@dataclass(frozen=True, slots=True)
class Copying:
    """What is asked for."""

    source: str
    """Directory of a store, or `CONFIG:TIER`."""
    config: Path
    tiers: tuple[str, ...]
    """Targets; all that are written and outlive their engine if empty."""
    namespace: str | None
    rate: int | None
    """Bytes per second."""
    most_bytes: int | None
    new_namespace: bool
    dry_run: bool
    keeping: Keeping | None = None


def copy_blocks_of(job: Copying, *, as_json: bool) -> None:
    """Copy, and print what was done.

    Raises:
        ConfigError: the source is none, or its fingerprint is not that of the target's engines.
        typer.Exit: blocks were left out, or there was no room.
    """
    from tiered_kv.config import load
    from tiered_kv.plugins import Plugins

    names = tiers_to_warm(load(job.config, Plugins()), job.tiers, job.config)
    source = _source(job.source)
    stored = _namespace(source, job.namespace)
    targets = [tier for name in names for tier in store_tiers(job.config, name)]
    for target in targets:
        if _same_place(source, target):
            raise ConfigError(f"--from: {job.source} is tier {target.name!r} itself")
        accept(stored.namespace, stored.geometry, target, source=job.source, new=job.new_namespace)
    if job.dry_run:
        _tell_size(job, stored, targets, as_json=as_json)
        return
    if job.keeping is not None:
        require_keeping(targets)
    began = time.monotonic()
    done, kept = _copy(job, source, stored, targets)
    if as_json:
        print_json(
            {
                "source": job.source,
                "namespace": stored.namespace.id.hex(),
                "source_blocks": stored.blocks,
                "tiers": {
                    name: asdict(copied) | ({"kept_blocks": kept[name].blocks} if kept else {})
                    for name, copied in done.items()
                },
                "seconds": time.monotonic() - began,
            }
        )
    else:
        for name, copied in done.items():
            limit = ", as many as --max-bytes allows" if copied.limited else ""
            gone = f", {copied.missing} evicted meanwhile" if copied.missing else ""
            typer.echo(
                f"tier {name}: {copied.blocks} of {stored.blocks} blocks, "
                f"{bytes_text(copied.bytes)}, copied; {copied.present} were there already"
                f"{limit}{gone}{_kept(kept.get(name))}"
            )
    _complain(job, done)


def _complain(job: Copying, done: dict[str, Copied]) -> None:
    failed = False
    for name, copied in done.items():
        if bad := copied.corrupt + copied.unreadable:
            warn(f"{bad} blocks of {job.source} are damaged or unreadable, and were left out")
        if copied.full:
            warn(
                f"tier {name!r} is full, and less used blocks of {job.source} were not copied: "
                f"{reason_in(name, copied.full)}"
            )
        nothing = copied.full and not (copied.blocks or copied.present)
        failed = failed or bool(bad or nothing)
    if failed:
        raise typer.Exit(FAILED)


def _kept(kept: Kept | None) -> str:
    return "" if kept is None else f"; {kept_text(kept)}"


def _copy(
    job: Copying, source: StoreTier, stored: StoredNamespace, targets: Sequence[StoreTier]
) -> tuple[dict[str, Copied], dict[str, Kept]]:
    from tiered_kv.cli.progress import Progress
    from tiered_kv.upkeep import batch_into, copy_blocks, most_used_first

    ranks = range(stored.geometry.world_size)
    done: dict[str, Copied] = {}
    kept: dict[str, Kept] = {}
    with Progress(stored.blocks * len(targets)) as progress, _going_on(progress):
        for target in targets:
            with ExitStack() as stack:
                progress.stage(f"tier {target.name}: copying {stored.namespace.id.hex()}")
                sources = {r: stack.enter_context(source.store(stored, r)) for r in ranks}
                into = {
                    r: stack.enter_context(target.store(stored, r, writable=True)) for r in ranks
                }
                if job.keeping is not None:
                    require_keeper(into[0], target)
                keys = list(most_used_first(sources[0]))
                done[target.name] = copy_blocks(
                    sources,
                    into,
                    keys,
                    block_bytes=max(group.block_bytes for group in stored.geometry.groups),
                    most_bytes=job.most_bytes,
                    batch_bytes=batch_into(target.settings.capacity),
                    pace=paced(job.rate),
                    progress=_advancing(progress, target.name, stored.blocks),
                )
                if job.keeping is not None:
                    there = [*compress(keys, into[0].contains(keys))]
                    geometry = stored.geometry
                    kept[target.name] = keep(into[0], target, geometry, there, job.keeping)
    return done, kept


@contextmanager
def _going_on(progress: Progress) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        progress.stage(
            "interrupted: what was copied is stored; the same command goes on from there"
        )
        raise


def _advancing(progress: Progress, tier: str, blocks: int) -> Callable[[int], None]:
    began, behind = time.monotonic(), 0

    def advance(some: int) -> None:
        nonlocal behind
        behind += some
        left = (time.monotonic() - began) / behind * max(0, blocks - behind) if behind else 0.0
        soon = f", at most {duration_text(left)} left" if left >= 0.5 else ""
        progress.advance(some, f"tier {tier}{soon}")

    return advance


def paced(rate: int | None) -> Callable[[int], object]:
    """Sleeps after each batch, so that no more than `rate` bytes per second are moved; not at all
    where there is no limit."""
    from tiered_kv.upkeep import Pace

    if rate is None:
        return lambda nbytes: None
    pace = Pace(rate)
    return lambda nbytes: time.sleep(pace.took(nbytes))


def _tell_size(
    job: Copying, stored: StoredNamespace, targets: Sequence[StoreTier], *, as_json: bool
) -> None:
    """For `--dry-run`; what lies in the targets already is not taken off."""
    size = stored.used_bytes
    wanted = size if job.most_bytes is None else min(size, job.most_bytes)
    seconds = None if job.rate is None else wanted * len(targets) / job.rate
    if as_json:
        print_json(
            {
                "source": job.source,
                "namespace": stored.namespace.id.hex(),
                "source_blocks": stored.blocks,
                "source_bytes": size,
                "tiers": {target.name: {"most_bytes": wanted} for target in targets},
                "seconds": seconds,
            }
        )
        return
    takes = "" if seconds is None else f", {duration_text(seconds)} at this rate"
    typer.echo(
        f"{job.source}: namespace {stored.namespace.id.hex()}, {stored.blocks} blocks, "
        f"{bytes_text(size)}; at most {bytes_text(wanted)} would go to tier "
        f"{' and tier '.join(target.name for target in targets)}{takes}"
    )


# The source


def _source(text: str) -> StoreTier:
    """A tier that is only read.

    Raises:
        ConfigError: it is none.
    """
    path = Path(text)
    if path.is_dir():
        return _of_directory(path.absolute())
    config, colon, tier = text.rpartition(":")
    if not colon or not Path(config).is_file():
        raise ConfigError(
            f"--from {text}: is neither the directory of a store nor CONFIG:TIER, a YAML file and "
            "the name of a tier in it"
        )
    [found] = store_tiers(Path(config), tier)
    return found.read_only()


def _of_directory(path: Path) -> StoreTier:
    from pydantic import ValidationError

    from tiered_kv.config import Deployment
    from tiered_kv.errors import PluginError
    from tiered_kv.plugins import Plugins

    markers = [path / MARKER, *sorted(path.glob(f"*/{MARKER}"))]
    marker = next((one for one in markers if one.is_file()), None)
    if marker is None:
        raise ConfigError(
            f"--from {path}: is no directory of a store ({MARKER} is not in it); name the tier as "
            "CONFIG:TIER if it is of another kind, or has several directories"
        )
    plugins = Plugins()
    try:
        kind = str(json.loads(marker.read_text(encoding="utf-8"))["kind"])
        said = {"name": "source", "type": kind, "path": path, "access": "read"}
        settings = plugins.settings(kind).model_validate(said)
    except (OSError, ValueError, KeyError, TypeError, ValidationError, PluginError) as error:
        raise ConfigError(
            f"--from {path}: {marker} does not tell what it is ({error}); name the tier as "
            "CONFIG:TIER"
        ) from error
    return StoreTier(settings, Deployment(tiers=(settings,)), plugins)


def _namespace(source: StoreTier, text: str | None) -> StoredNamespace:
    held = [stored for stored in source.namespaces() if stored.blocks]
    if text is not None:
        return chosen({source.name: held}, text)[source.name]
    if not held:
        raise ConfigError(f"--from: tier {source.name!r} holds no blocks")
    if len(held) > 1:
        listed = ", ".join(f"{one.namespace.id.hex()} ({one.blocks} blocks)" for one in held)
        raise ConfigError(
            f"--from: tier {source.name!r} holds several namespaces; choose with --namespace: "
            f"{listed}"
        )
    return held[0]


def _same_place(source: StoreTier, target: StoreTier) -> bool:
    mine = {path.resolve() for path in source.settings.directories.values()}
    return any(path.resolve() in mine for path in target.settings.directories.values())
