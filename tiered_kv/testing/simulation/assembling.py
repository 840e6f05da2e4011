"""From a deployment's file to what a simulation runs on."""

from __future__ import annotations

from pathlib import Path

from tiered_kv.config import load
from tiered_kv.connector.assembly import Assembly
from tiered_kv.plugins import Plugins

__all__ = ["assemble"]


def assemble(file: Path, plugins: Plugins | None = None) -> Assembly:
    """The deployment of a YAML file with its backends, found as a real engine finds them.

    Raises:
        RefuseToStart: the file cannot be used, or a backend that it names cannot.
    """
    plugins = Plugins() if plugins is None else plugins
    deployment = load(file, plugins)
    return Assembly(deployment, plugins.deployed(tier.type for tier in deployment.tiers))
