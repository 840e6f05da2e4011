"""The deployment that the engine of `warm` gets: the tiers to be warmed, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tiered_kv.config.document import ENV_PREFIX
from tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from tiered_kv.config import Deployment, TierSettings

__all__ = ["engine_environment", "tiers_to_warm", "write_deployment"]

GIB = 2**30

_AT_LEAST = {
    "store_deadline": 120.0,
    "store_queue_time": 600.0,
    "load_deadline": 60.0,
    "lookup_wait": 60.0,
}
"""Limits in seconds: nobody waits for an answer meanwhile, and what is given up has to be done
again."""


def tiers_to_warm(deployment: Deployment, named: Sequence[str], file: Path) -> tuple[str, ...]:
    """Names of the tiers, nearest first: those that are named, by default all that are written.

    Raises:
        ConfigError: one is not there, may not be written or ends with its process; or none is
            left.
    """
    stores = {tier.name: tier for tier in deployment.stores}
    for name in named:
        if deployment.cpu is not None and deployment.cpu.name == name:
            raise ConfigError(
                f"--tier {name}: this tier is the host's, and ends with its engine; name one that "
                f"outlives it: {', '.join(stores) or 'there is none'}"
            )
        if name not in stores:
            near = get_close_matches(name, stores, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"--tier {name}: {file} has no such tier; {hint}there are {', '.join(stores)}"
            )
        if not stores[name].writable:
            raise ConfigError(
                f"--tier {name}: this tier is read only (access: read) in {file}; warm it with a "
                "configuration in which it may be written"
            )
    written = {tier.name for tier in deployment.write_order}
    chosen = tuple(name for name in stores if name in (named or written))
    if not chosen:
        raise ConfigError(
            f"{file}: no tier that outlives its process may be written, so there is nothing to "
            "warm; name one in placement.write",
            file=file,
            key="placement.write",
        )
    return chosen


def write_deployment(deployment: Deployment, tiers: Sequence[str], target: Path) -> None:
    """Write the YAML file of the engine.

    It has the tiers alone: what is stored goes straight to them, through staging as large as the
    host tier (at most 1 GiB), and nothing is found in memory that would then not be written. What
    is found is loaded, every block is worth storing, and nothing is given up because it takes
    long. Blocks are the same as those of the whole deployment: nothing of this is in the
    fingerprint.
    """
    said = deployment.model_dump(mode="json")
    said["tiers"] = [
        _unexpanded(tier, dumped)
        for tier, dumped in zip(deployment.tiers, said["tiers"], strict=True)
        if tier.name in tiers
    ]
    said["placement"] = {"write": list(tiers), "admit": {"min_uses": 1}}
    said["recompute"] = {"gate": "off"}
    limits, kept = deployment.limits, said["limits"]
    host = 0 if deployment.cpu is None else int(deployment.cpu.capacity)
    kept["staging"] = f"{max(int(limits.staging), min(host, GIB))}B"
    for name, seconds in _AT_LEAST.items():
        kept[name] = f"{max(getattr(limits, name), seconds):g}s"
    target.write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")


def _unexpanded(tier: TierSettings, dumped: dict[str, Any]) -> dict[str, Any]:
    """With directories that are read back as they are, should a name have a $."""
    for field in {name.partition(".")[0] for name in tier.directories}:
        value = dumped[field]
        one = isinstance(value, str)
        dumped[field] = value.replace("$", "$$") if one else [v.replace("$", "$$") for v in value]
    return dumped


def engine_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what overrides a deployment: that is in the file already, and the
    places of the tiers are others there."""
    return {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)}
