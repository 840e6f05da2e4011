"""Finds backends through the entry-point group `tiered_kv.backends`.

Entry points are read on first use and one backend is loaded when it is asked for. A backend that
cannot be loaded stays in the list with its reason; only a deployment that names it fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin

from tiered_kv.announced import (
    NAME,
    by_name,
    call_problems,
    descriptor_problems,
    distribution_of,
    load_descriptor,
    said,
)
from tiered_kv.config import TierSettings
from tiered_kv.contracts import Backend
from tiered_kv.errors import PluginError
from tiered_kv.registry import TransferRegistry
from tiered_kv.specs import CpuSpec, GpuSpec, KeySpec
from tiered_kv.values import Medium

__all__ = ["GROUP", "Availability", "Plugins", "build_registry"]

GROUP = "tiered_kv.backends"
"""The entry-point group. The entry point's name is the backend's name."""

_CLASH_HINT = "uninstall one of the packages named in the reason"
_CORE_NAMES = (CpuSpec.medium,)
_CORE_MEDIA = (CpuSpec.medium, GpuSpec.medium)


@dataclass(frozen=True, slots=True)
class Availability:
    """One line of `tiered-kv backends`."""

    name: str
    distribution: str
    """Name of the package that announces it, "unknown" where that is not recorded."""
    version: str
    """Version of the distribution."""
    medium: str | None
    """None where the backend cannot be loaded."""
    description: str
    available: bool
    tier: bool
    """Whether it can be the `type` of a tier; others bring handlers only."""
    reason: str | None = None
    """Why it is not available."""
    hint: str | None = None
    """What to do about it."""


class Plugins:
    """The backends that are installed. Thread-safe.

    Fulfils `tiered_kv.config.TierTypes`.
    """

    def __init__(self, discover: Callable[[], Iterable[EntryPoint]] | None = None) -> None:
        """Read nothing yet; `discover` gives the entry points, by default the installed ones."""
        self._discover = discover if discover is not None else _installed
        self._lock = threading.RLock()
        self._found: dict[str, list[EntryPoint]] | None = None
        self._loaded: dict[str, Backend | PluginError] = {}

    def refresh(self) -> None:
        """Forget what was found and loaded; packages that are imported stay imported."""
        with self._lock:
            self._found = None
            self._loaded.clear()

    def all_names(self) -> tuple[str, ...]:
        """Names of every backend that is announced, sorted; loads none."""
        return tuple(sorted(self._entries()))

    def names(self) -> tuple[str, ...]:
        """Names that the `type` of a tier may have: every backend but those known to bring no
        tier. Loads every backend."""
        return tuple(name for name in self.all_names() if self._may_be_tier(name))

    def get(self, name: str) -> Backend:
        """Load a backend. What it needs at run time may be missing; see `usable`.

        Raises:
            KeyError: none of this name is announced.
            PluginError: it cannot be loaded, has the wrong shape, or two packages claim the name.
        """
        with self._lock:
            if name not in self._loaded:
                try:
                    self._loaded[name] = load_descriptor(
                        "backend", name, self._entries()[name], Backend, _problems
                    )
                except PluginError as error:
                    self._loaded[name] = error
            loaded = self._loaded[name]
        if isinstance(loaded, PluginError):
            raise PluginError(str(loaded)) from loaded
        return loaded

    def usable(self, name: str) -> Backend:
        """Load a backend that is going to be used.

        Raises:
            PluginError: as for `get`; or it is not announced, or a package that it needs is not
                installed (the message says which).
        """
        try:
            backend = self.get(name)
        except KeyError:
            raise PluginError(f"there is no backend {name!r}; {self._nearest(name)}") from None
        missing = _missing(backend)
        if missing:
            raise PluginError(f"backend {name!r} {_needs(missing)}; {_hint(missing)}")
        return backend

    def settings(self, name: str) -> type[TierSettings]:
        """The settings model of a tier type.

        Raises:
            KeyError: no backend of this name is announced.
            PluginError: it cannot be loaded or its settings have the wrong shape.
        """
        backend = self.get(name)
        if backend.settings is None:
            raise PluginError(f"backend {name!r} cannot be a tier: it only brings handlers")
        return _checked_settings(backend, backend.settings)

    def deployed(self, types: Iterable[str]) -> dict[str, Backend]:
        """The backends that a deployment needs, by name: those of its tiers' types (`cpu`, the
        core's own, is skipped), and every other usable one that brings handlers but no tier.

        Raises:
            PluginError: one of `types` is not usable.
        """
        wanted = {name: self.usable(name) for name in dict.fromkeys(types) if name != "cpu"}
        for name in self.all_names():
            if name in wanted:
                continue
            try:
                backend = self.usable(name)
            except PluginError:
                continue  # nothing here names it; `report` has the reason
            if backend.settings is None:
                wanted[name] = backend
        return wanted

    def report(self) -> tuple[Availability, ...]:
        """Every announced backend, usable or not, with the reason. Registers the handlers of the
        usable ones, to tell which of them cannot be used side by side."""
        found = [self._availability(name) for name in self.all_names()]
        clashes = self._clashes([line.name for line in found if line.available])
        return tuple(
            replace(line, available=False, reason=clashes[line.name], hint=_CLASH_HINT)
            if line.name in clashes
            else line
            for line in found
        )

    def _clashes(self, names: Iterable[str]) -> dict[str, str]:
        """Which backends claim what an earlier one has claimed, and the text that names both."""
        registry = TransferRegistry()
        owners: dict[Medium, str] = {}
        clashes: dict[str, str] = {}
        for name in names:
            backend = self.get(name)
            try:
                if backend.spec is not None:
                    owner = owners.setdefault(backend.medium, name)
                    if owner != name:
                        raise PluginError(
                            f"backend {name!r} brings the medium {backend.medium!r}, which "
                            f"{owner!r} brings too"
                        )
                _register(backend, registry)
            except PluginError as error:
                clashes[name] = str(error)
        return clashes

    def _availability(self, name: str) -> Availability:
        entries = self._entries()[name]
        distribution = ", ".join(distribution_of(entry) for entry in entries)
        version = ", ".join(entry.dist.version if entry.dist else "unknown" for entry in entries)
        try:
            backend = self.get(name)
            if backend.settings is not None:
                _checked_settings(backend, backend.settings)
        except PluginError as error:
            hint = "update or uninstall one of the packages named in the reason"
            return Availability(
                name, distribution, version, None, "", False, True, str(error), hint
            )
        missing = _missing(backend)
        return Availability(
            name=name,
            distribution=distribution,
            version=version,
            medium=backend.medium,
            description=backend.description,
            available=not missing,
            tier=backend.settings is not None,
            reason=_needs(missing) if missing else None,
            hint=_hint(missing) if missing else None,
        )

    def _may_be_tier(self, name: str) -> bool:
        try:
            return self.get(name).settings is not None
        except PluginError:
            return True

    def _nearest(self, name: str) -> str:
        names = self.all_names()
        near = get_close_matches(name, names, 1)
        every = f"installed are {', '.join(names)}" if names else "none is installed"
        return f"did you mean {near[0]!r}? ({every})" if near else every

    def _entries(self) -> dict[str, list[EntryPoint]]:
        with self._lock:
            if self._found is None:
                self._found = by_name(self._discover())
            return self._found


def build_registry(backends: Mapping[str, Backend]) -> TransferRegistry:
    """A new registry with the handlers that these backends register themselves.

    Raises:
        PluginError: two of them claim one pair or medium, or registering failed.
    """
    registry = TransferRegistry()
    for backend in backends.values():
        _register(backend, registry)
    return registry


def _register(backend: Backend, registry: TransferRegistry) -> None:
    if backend.register is None:
        return
    try:
        backend.register(registry)
    except PluginError:
        raise
    except Exception as error:  # a plug-in may raise anything, and it was asked for
        raise PluginError(
            f"backend {backend.name!r} failed to register its handlers: {said(error)}"
        ) from error


def _installed() -> Iterable[EntryPoint]:
    return entry_points(group=GROUP)


def _problems(name: str, loaded: Backend) -> Iterable[str]:
    """What is wrong with a descriptor, gravest first."""
    yield from descriptor_problems("backend", name, loaded)
    if not NAME.fullmatch(name) or name in _CORE_NAMES:
        yield "has a name that no tier type may have: a-z, 0-9, _ and -, and not cpu"
    store = (loaded.settings, loaded.spec, loaded.open_store)
    if any(part is not None for part in store) and None in store:
        yield "must bring settings, spec and open_store together, or none of them"
    if None in store and loaded.register is None:
        yield "brings neither a store (settings, spec, open_store) nor handlers (register)"
    yield from _spec_problems(loaded)
    for field, arguments, expected in (
        ("settings", (), "settings() -> type[TierSettings]"),
        ("open_store", (None,), "open_store(context: StoreContext) -> BlockStore"),
        ("register", (None,), "register(registry: TransferRegistry) -> None"),
        (
            "open_maintenance",
            (None,),
            "open_maintenance(context: MaintenanceContext) -> StoreMaintenance",
        ),
    ):
        given = getattr(loaded, field)
        if given is not None:
            yield from call_problems(field, given, arguments, expected)


def _spec_problems(backend: Backend) -> Iterable[str]:
    spec: object = backend.spec
    if spec is None:
        return
    if not (isinstance(spec, type) and issubclass(spec, KeySpec)) or spec is KeySpec:
        yield f"has the spec {spec!r}; expected a subclass of tiered_kv.specs.KeySpec of its own"
    elif "medium" not in vars(spec):
        yield f"has a spec, {spec.__qualname__}, that does not set `medium` itself"
    elif spec.medium != backend.medium:
        yield f"has medium {backend.medium!r}, but its spec has {spec.medium!r}"
    elif spec.medium in _CORE_MEDIA:
        yield f"claims the medium {spec.medium!r}, which is the core's own"


def _checked_settings(backend: Backend, give: Callable[[], Any]) -> type[TierSettings]:
    origin = f"backend {backend.name!r}"
    try:
        model: object = give()
    except Exception as error:  # foreign code may raise anything, and it was asked for
        raise PluginError(f"{origin} cannot give its settings: {said(error)}") from error
    if not (isinstance(model, type) and issubclass(model, TierSettings)):
        raise PluginError(
            f"{origin} has the settings {model!r}; expected a subclass of "
            "tiered_kv.config.TierSettings"
        )
    annotation = model.model_fields["type"].annotation
    if get_origin(annotation) is not Literal or get_args(annotation) != (backend.name,):
        raise PluginError(
            f"{origin} has settings, {model.__qualname__}, without "
            f'`type: Literal["{backend.name}"] = "{backend.name}"`'
        )
    if model.model_config.get("extra") != "forbid" or not model.model_config.get("frozen"):
        raise PluginError(
            f"{origin} has settings, {model.__qualname__}, that are not frozen or allow unknown "
            "keys; keep what TierSettings sets"
        )
    return model


def _missing(backend: Backend) -> tuple[tuple[str, str], ...]:
    return tuple(needed for needed in backend.requires if not _importable(needed[0]))


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that fails, or a module without a spec
        return False


def _needs(missing: tuple[tuple[str, str], ...]) -> str:
    return f"needs {', '.join(module for module, _ in missing)}, which is not installed"


def _hint(missing: tuple[tuple[str, str], ...]) -> str:
    return "pip install " + " ".join(f"'{package}'" for _, package in missing)
