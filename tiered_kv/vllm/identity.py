"""What determines the bytes of a vLLM engine's KV blocks, as one fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import try_to_load_from_cache

from tiered_kv.connector.weights import config_identity, weights_identity
from tiered_kv.errors import IdentityError
from tiered_kv.values import FORMAT_VERSION, Fingerprint
from tiered_kv.vllm.compat import none_hash_seed

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.config import OffloadingConfig

    from tiered_kv.config import NamespaceSettings

__all__ = ["adapter_identity", "engine_fingerprint"]


def engine_fingerprint(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    offloading: OffloadingConfig,
    namespace: NamespaceSettings,
) -> Fingerprint:
    """Compute the fingerprint; the same in the scheduler's and in every worker's process.

    Raises:
        IdentityError: a part cannot be told (no weight files, an unresolved "auto").
    """
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = offloading.parallel
    groups = [
        {
            "tokens": group.tokens_per_block,
            "layers": len(group.layer_names),
            "first_layer": group.layer_names[0],
            "spec": _spec(kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
        }
        for group in offloading.groups
    ]
    return Fingerprint.of(
        {
            "format": FORMAT_VERSION,
            "engine": "vllm",
            "name": namespace.name or "-",
            "weights": namespace.weights or _weights(str(model.model), model.revision),
            "draft": _draft(vllm_config, namespace.weights),
            "config": _config(model.hf_config_path),
            "architectures": ",".join(model.architectures),
            "quantization": model.quantization or "-",
            "overrides": _text(model.hf_overrides),
            "long_context": _long_context(model),
            "dtype": str(model.dtype),
            "kv_dtype": offloading.model.dtype,
            "kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
            "layout": getattr(offloading, "kv_cache_layout", None) or "by tensor",
            "block_bytes": offloading.worker_kv_bytes_per_block,
            "chunk": offloading.cache.blocks_per_chunk,
            "tokens_per_hash": offloading.cache.tokens_per_hash,
            "groups": json.dumps(groups, sort_keys=True),
            "world": parallel.world_size,
            "tp": parallel.tp_size,
            "pp": parallel.pp_size,
            "pcp": parallel.pcp_size,
            "dcp": parallel.dcp_size,
            "hash": str(cache.prefix_caching_hash_algo),
            "hash_seed": none_hash_seed(),
        }
    )


def _text(overrides: object) -> str:
    if callable(overrides):
        raise IdentityError(
            "hf_overrides is a function, whose effect on the blocks cannot be told; "
            "give the overrides as a dictionary"
        )
    try:
        return json.dumps(overrides or {}, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise IdentityError(
            f"hf_overrides holds a value whose effect on the blocks cannot be told ({error}); "
            "give plain values"
        ) from error


def _long_context(model: ModelConfig) -> str:
    """The longest context, where vLLM chooses the factors of RoPE by it (LongRoPE)."""
    text = model.hf_text_config
    ropes = [getattr(text, name, None) for name in ("rope_parameters", "rope_scaling")]
    return str(model.max_model_len) if "longrope" in repr(ropes) else "-"


def _spec(spec: KVCacheSpec) -> str:
    # The scheduler's settings name one layer's spec where the worker's name those of all layers.
    layers: dict[str, KVCacheSpec] | None = getattr(spec, "kv_cache_specs", None)
    return repr(next(iter(layers.values())) if layers else spec)


def _draft(vllm_config: VllmConfig, named: str | None) -> str:
    """The model that drafts tokens: its layers' KV lies in the same blocks."""
    speculative = vllm_config.speculative_config
    model = None if speculative is None else speculative.draft_model_config
    if speculative is None or model is None:
        return "-"
    target = vllm_config.model_config
    if (model.model, model.revision) == (target.model, target.revision):
        return f"{speculative.method}: its own"
    return f"{speculative.method}: {named or _weights(str(model.model), model.revision)}"


def _config(path: str | None) -> str:
    """The model's configuration, where it is not the one beside the weights."""
    if path is None:
        return "beside the weights"
    file = Path(path) / "config.json"
    if not file.is_file():
        return path
    try:
        return config_identity(file)
    except OSError as error:
        raise IdentityError(f"cannot read the model's configuration: {error}") from error


def adapter_identity(path: str) -> str:
    """Name the contents of a LoRA adapter, by its directory or its name on the hub. Reads files.

    Raises:
        IdentityError: there are no weight files, or they cannot be read.
    """
    # What vLLM calls for adapters (not for models); pathlib's raises for a user that is not there.
    expanded = os.path.expanduser(path)  # noqa: PTH111
    return weights_identity(_directory(expanded, "adapter_config.json", None))


def _weights(model: str, revision: str | None) -> str:
    try:
        return weights_identity(_directory(model, "config.json", revision))
    except IdentityError as error:
        raise IdentityError(f"{error}; set namespace.weights in the configuration") from error


def _directory(name: str, config: str, revision: str | None) -> Path:
    """Where a model or an adapter lies on this machine."""
    path = Path(name)
    if path.exists():
        return path
    try:
        cached = try_to_load_from_cache(name, config, revision=revision or "main")
    except ValueError:  # no name that the hub could have
        cached = None
    if not isinstance(cached, str):
        raise IdentityError(
            f"{name!r} is neither a directory nor in the local model cache, so its weights cannot "
            "be told apart from others"
        )
    return Path(cached).parent
