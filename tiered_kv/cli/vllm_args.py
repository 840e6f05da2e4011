"""`tiered-kv vllm-args`: the flags that start vLLM with a deployment."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import typer

from tiered_kv.cli.output import Config, Json, print_json

__all__ = ["engine_arguments", "vllm_args"]


def engine_arguments(config: Path) -> dict[str, Any]:
    """vLLM's engine arguments for a deployment, by their names in Python."""
    return {
        "kv_transfer_config": {
            "kv_connector": "TieredKVConnector",
            "kv_connector_module_path": "tiered_kv.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": os.path.abspath(config)},  # noqa: PTH100 - keeps links
        },
        "prefix_caching_hash_algo": "sha256_cbor",
    }


def vllm_args(config: Config, as_json: Json = False) -> None:
    """Check a configuration and print the flags that `vllm serve` needs for it."""
    from tiered_kv.config import load
    from tiered_kv.plugins import Plugins

    load(config, Plugins())
    arguments = engine_arguments(config)
    if as_json:
        print_json(arguments)
        return
    flags: list[str] = []
    for name, value in arguments.items():
        flags.append(f"--{name.replace('_', '-')}")
        flags.append(value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
    typer.echo(shlex.join(flags))
