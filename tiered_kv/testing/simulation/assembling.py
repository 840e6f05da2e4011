"""From a deployment's file to what a simulation runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tiered_kv.config import load
from tiered_kv.connector.assembly import Assembly
from tiered_kv.plugins import Plugins
from tiered_kv.testing.faults import Faults, faulty_backend

__all__ = ["assemble"]


def assemble(
    file: Path, plugins: Plugins | None = None, *, faults: Mapping[str, Faults] | None = None
) -> Assembly:
    """The deployment of a YAML file with its backends, found as a real engine finds them.

    Args:
        file: the deployment.
        plugins: where backends are found; the installed ones if not given.
        faults: by the name of a tier, what goes wrong in its stores. Blocks of tiers of its type
            go through host memory then, see `faulty_backend`.

    Raises:
        RefuseToStart: the file cannot be used, or a backend that it names cannot.
        ValueError: there are faults for a tier that the file does not have, or that has no store.
    """
    plugins = Plugins() if plugins is None else plugins
    deployment = load(file, plugins)
    backends = dict(plugins.deployed(tier.type for tier in deployment.tiers))
    wrong = dict(faults or {})
    types = {tier.name: tier.type for tier in deployment.tiers}
    for name in wrong:
        if types.get(name) not in backends:
            raise ValueError(f"no tier {name!r} with a store in {file}; it has {', '.join(types)}")
    for type_ in {types[name] for name in wrong}:
        backends[type_] = faulty_backend(
            backends[type_],
            lambda context: wrong.get(context.tier, Faults()),
        )
    return Assembly(deployment, backends)
