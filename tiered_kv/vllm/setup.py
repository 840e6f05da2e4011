"""From vLLM's settings to a deployment: made alike in the scheduler's and the workers' process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)

from tiered_kv.config import load
from tiered_kv.connector import auto_chunk
from tiered_kv.connector.assembly import Assembly
from tiered_kv.errors import ConfigError
from tiered_kv.plugins import Plugins
from tiered_kv.values import Fingerprint
from tiered_kv.vllm.compat import check_flags, check_version, share_log
from tiered_kv.vllm.identity import engine_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["Setup", "config_path", "make_setup"]

SPEC = {"spec_name": "TieredKVSpec", "spec_module_path": "tiered_kv.vllm.spec"}


@dataclass(frozen=True, slots=True)
class Setup:
    """A deployment, bound to one engine."""

    assembly: Assembly
    fingerprint: Fingerprint
    offloading: OffloadingConfig


def config_path(extra_config: Mapping[str, Any]) -> Path:
    """The YAML file that `kv_connector_extra_config` names.

    Raises:
        ConfigError: it names none.
    """
    path = extra_config.get("config")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            'kv_connector_extra_config must name the deployment, {"config": "/path/to/file.yaml"}; '
            f"it is {dict(extra_config)!r}"
        )
    return Path(path)


def make_setup(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
    """Read the deployment and check that this engine can work with it.

    Raises:
        RefuseToStart: the version, a flag, the YAML, a plug-in or the model's identity.
    """
    share_log()
    check_version()
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None  # vLLM makes no connector without it
    extra = transfer.kv_connector_extra_config
    plugins = Plugins()
    deployment = load(config_path(extra), plugins)
    backends = plugins.deployed(tier.type for tier in deployment.tiers)
    check_flags(vllm_config, persistent=bool(deployment.stores))
    extra.update(SPEC)
    extra["offload_prompt_only"] = deployment.store == "prompt"
    extra.pop("blocks_per_chunk", None)
    extra.pop("block_size", None)
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    extra["blocks_per_chunk"] = deployment.chunk or _auto_chunk(offloading)
    offloading = build_offloading_config(vllm_config, kv_cache_config)
    return Setup(
        Assembly(deployment, backends),
        engine_fingerprint(vllm_config, kv_cache_config, offloading, deployment.namespace),
        offloading,
    )


def _auto_chunk(offloading: OffloadingConfig) -> int:
    tokens = max(group.tokens_per_block for group in offloading.groups)
    return auto_chunk(offloading.worker_kv_bytes_per_block, tokens)
