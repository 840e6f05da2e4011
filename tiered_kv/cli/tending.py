"""What the commands that look after stored blocks have in common: tiers, namespaces, errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

from tiered_kv.errors import ConfigError, TieredKVError, TierError, reason_in

if TYPE_CHECKING:
    from tiered_kv.config import Deployment, TierSettings
    from tiered_kv.connector.assembly import Assembly
    from tiered_kv.contracts import BlockStore, StoredNamespace, StoreMaintenance
    from tiered_kv.plugins import Plugins

__all__ = ["NamespaceId", "StoreTier", "Tended", "chosen", "store_tiers", "tend"]

T = TypeVar("T")

NamespaceId = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="ID",
        help="Id of a namespace, as `ls` shows it; its beginning is enough.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class StoreTier:
    """One store tier of a deployment, closed."""

    settings: TierSettings
    deployment: Deployment
    plugins: Plugins

    @property
    def name(self) -> str:
        """Its name."""
        return self.settings.name

    def require_writable(self, what: str) -> None:
        """Refuse what changes a tier that is read only.

        Raises:
            ConfigError: it is.
        """
        if not self.settings.writable:
            raise ConfigError(
                f"tier {self.name!r} is read only (access: read), so {what}; name a configuration "
                "in which it may be written"
            )

    @property
    def is_there(self) -> bool:
        """Whether there is anything that could be opened; looking makes no directories."""
        directories = self.settings.directories.values()
        return not directories or any(_holds_something(directory) for directory in directories)

    def held_bytes(self) -> int:
        """What its directories take on their file systems."""
        total = 0
        for directory in self.settings.directories.values():
            for folder, _, names in os.walk(directory):
                for name in names:
                    with suppress(OSError):  # gone meanwhile, or not ours to see
                        total += Path(folder, name).lstat().st_blocks * 512
        return total

    @contextmanager
    def maintenance(self, *, writable: bool) -> Iterator[StoreMaintenance]:
        """What looks after all its namespaces, open."""
        with _blamed(self.name):
            opened = self._assembly().open_maintenance(self.name, writable=writable)
            try:
                yield opened
            finally:
                opened.close()

    @contextmanager
    def store(
        self, stored: StoredNamespace, rank: int, *, writable: bool = False
    ) -> Iterator[BlockStore]:
        """A rank's store of one of its namespaces, open. What only reads opens the tier as one
        that is read only: an engine's store may drop what a lowered capacity has no room for."""
        with _blamed(self.name):
            geometry = replace(stored.geometry, rank=rank)
            looking = self if writable else self.read_only()
            opened = looking._assembly().open_namespace(
                self.name, geometry, stored.namespace, writable=writable
            )
            try:
                yield opened
            finally:
                opened.close()

    def read_only(self) -> StoreTier:
        """The same tier as one that may only be read, where its type knows such."""
        if "access" not in type(self.settings).model_fields:
            return self
        settings = self.settings.model_copy(update={"access": "read"})
        tiers = tuple(settings if one.name == self.name else one for one in self.deployment.tiers)
        deployment = self.deployment.model_copy(update={"tiers": tiers})
        return replace(self, settings=settings, deployment=deployment)

    def namespaces(self) -> Sequence[StoredNamespace]:
        """What it holds, sorted by id."""
        if not self.is_there:
            return ()
        with self.maintenance(writable=False) as maintenance:
            return tuple(maintenance.namespaces())

    def _assembly(self) -> Assembly:
        from tiered_kv.connector.assembly import Assembly

        kind = self.settings.type
        return Assembly(self.deployment, {kind: self.plugins.usable(kind)})


def _holds_something(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # whoever opens the tier says what is wrong


@contextmanager
def _blamed(tier: str) -> Iterator[None]:
    """A plug-in that raises what no contract allows is named, not shown as a traceback."""
    try:
        yield
    except (TieredKVError, typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:  # a plug-in may raise anything; the tier is named
        raise TierError(
            f"tier {tier!r} breaks the contract of a backend by raising "
            f"{type(error).__name__}: {error}",
            tier=tier,
        ) from error


def store_tiers(config: Path, name: str | None) -> list[StoreTier]:
    """The tiers of a configuration that keep blocks in a store: all of them, or one.

    Raises:
        ConfigError: the configuration has a mistake, or there is no such tier.
    """
    from difflib import get_close_matches

    from tiered_kv.config import load
    from tiered_kv.plugins import Plugins

    plugins = Plugins()
    deployment = load(config, plugins)
    found = [StoreTier(settings, deployment, plugins) for settings in deployment.stores]
    names = [tier.name for tier in found]
    if name is None:
        if not found:
            raise ConfigError(f"{config}: no tier outlives its process, so there is nothing stored")
        return found
    if name in names:
        return [tier for tier in found if tier.name == name]
    if deployment.cpu is not None and deployment.cpu.name == name:
        raise ConfigError(f"tier {name!r} is the host's, and ends with its engine; look at others")
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    listed = f"there are {', '.join(names)}" if names else "there is none that keeps blocks"
    raise ConfigError(f"{config} has no tier {name!r}; {hint}{listed}")


@dataclass(frozen=True, slots=True)
class Tended(Generic[T]):
    """What was found in each of several tiers, by name."""

    found: dict[str, T]
    failed: dict[str, TieredKVError]
    """Told on stderr already."""

    def entries(self, tiers: Sequence[StoreTier], say: Callable[[T], dict[str, Any]]) -> list[Any]:
        """One JSON object per tier: name, type, and what was found or why nothing was."""
        return [
            {"tier": tier.name, "type": tier.settings.type}
            | (
                say(self.found[tier.name])
                if tier.name in self.found
                else {"error": str(self.failed[tier.name])}
            )
            for tier in tiers
        ]


def tend(tiers: Sequence[StoreTier], do: Callable[[StoreTier], T]) -> Tended[T]:
    """Do something in each tier. A broken tier is told on stderr and hides no other; the error of
    an only tier is raised."""
    found: dict[str, T] = {}
    failed: dict[str, TieredKVError] = {}
    for tier in tiers:
        try:
            found[tier.name] = do(tier)
        except TieredKVError as error:
            if len(tiers) == 1:
                raise
            typer.echo(f"error: tier {tier.name!r}: {reason_in(tier.name, error)}", err=True)
            failed[tier.name] = error
    return Tended(found, failed)


def chosen(held: Mapping[str, Sequence[StoredNamespace]], text: str) -> dict[str, StoredNamespace]:
    """By tier, the namespace whose id begins with `text`; tiers that do not hold it are left out.

    Raises:
        ConfigError: none or several ids begin so; the text shows which come near.
    """
    from tiered_kv.upkeep import NoSuchNamespace, find

    known = [stored.namespace.id for namespaces in held.values() for stored in namespaces]
    try:
        wanted = find(text, known)
    except NoSuchNamespace as error:
        raise ConfigError(f"--namespace: {error}") from error
    return {
        tier: stored
        for tier, namespaces in held.items()
        for stored in namespaces
        if stored.namespace.id == wanted
    }
