"""`tiered-kv schema`: the JSON schema of the YAML file."""

from __future__ import annotations

from tiered_kv.cli.output import Json, print_json

__all__ = ["schema"]


def schema(as_json: Json = False) -> None:
    """Print the JSON schema of the YAML file, for editors. It is JSON with and without --json."""
    from tiered_kv import config
    from tiered_kv.plugins import Plugins

    print_json(config.schema(Plugins()))
