"""The deployments that come with tiered-kv."""

from __future__ import annotations

from pathlib import Path

import tiered_kv
from tiered_kv.errors import ConfigError

__all__ = ["shipped", "shipped_names"]


def _folder() -> Path:
    package = Path(tiered_kv.__file__).resolve().parent
    installed = package / "configs"
    # In a checkout the package and its configs lie side by side.
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_names() -> tuple[str, ...]:
    """Names of the shipped deployments, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def shipped(name: str) -> Path:
    """The YAML file of a shipped deployment, such as "demo".

    Raises:
        ConfigError: there is none of this name.
    """
    names = shipped_names()
    if name not in names:
        raise ConfigError(f"no shipped deployment is named {name!r}; there are {', '.join(names)}")
    return _folder() / f"{name}.yaml"
