"""How many bytes of KV a token takes, from a model's `config.json`.

Of an attention layer with K and V: 2 x KV heads x head size x bytes per value. Of one with latent
attention (MLA): (`kv_lora_rank` + `qk_rope_head_dim`) x bytes per value, which every rank holds
whole. Layers with a sliding window count in full: their blocks are stored as they are computed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.errors import TraceError
from tiered_kv.planning.quoting import MOST_COUNT, quoted

__all__ = ["KVShape", "find_config", "kv_shape"]

_VALUE_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
    "int8": 1,
}
"""By the names that vLLM's --kv-cache-dtype and models use."""

_INNER = ("text_config", "llm_config", "language_config", "language_model_config")
"""Where models of several kinds of input keep what the language model is."""

_PER_REQUEST = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
"""Kinds of layers whose state is per request, not per token."""
_PER_REQUEST_KEYS = (
    *("ssm_cfg", "mamba_d_state", "ssm_state_size", "hybrid_override_pattern"),
    *("layers_block_type", "attn_layer_period", "linear_attn_config", "block_types"),
)


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of a token."""

    source: str
    """Where this is known from, for people."""
    bytes_per_token: float
    """Over all ranks: what a token takes in tiers that all ranks share."""
    ranks: int
    notes: tuple[str, ...] = ()

    @property
    def rank_bytes_per_token(self) -> float:
        """What a token takes on one rank."""
        return self.bytes_per_token / self.ranks


def find_config(model: str) -> Path:
    """The `config.json` of a model: the file, a folder that holds it, or a model of the hub that
    was downloaded before. Asks no network.

    Raises:
        TraceError: there is none; it says where was looked.
    """
    given = Path(model)
    candidates = [given if given.suffix == ".json" else given / "config.json"]
    if given.suffix != ".json" and model.count("/") == 1 and not given.exists():
        repository = _hub_cache() / f"models--{model.replace('/', '--')}"
        snapshots = repository / "snapshots"
        try:
            candidates.append(
                snapshots / (repository / "refs/main").read_text().strip() / "config.json"
            )
        except OSError:
            candidates += sorted(snapshots.glob("*/config.json")) or [
                snapshots / "*" / "config.json"
            ]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise TraceError(
        f"{model}: is no model here (looked for {', '.join(map(str, candidates))}); give its "
        "folder, its config.json, or --bytes-per-token"
    )


def _hub_cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(given or f"{home}/hub").expanduser()


def kv_shape(config: Path, kv_dtype: str = "auto", ranks: int = 1) -> KVShape:
    """KV of a token of the model that a `config.json` describes.

    Args:
        config: the file.
        kv_dtype: as vLLM's --kv-cache-dtype; auto: as the model says.
        ranks: over which its heads are spread (tensor parallelism).

    Raises:
        TraceError: the file cannot be read, or the model keeps other than K and V per token.
    """
    values = _read(config)
    for name in _INNER:
        if isinstance(values.get(name), dict):
            values = {**values, **values[name]}
    notes: list[str] = []
    layers = _layers(config, values, notes)
    value_bytes = _value_bytes(config, values, kv_dtype, notes)
    if values.get("kv_lora_rank"):
        width = _number(config, values, "kv_lora_rank")
        width += _number(config, values, "qk_rope_head_dim")
        per_token = layers * width * value_bytes * ranks
        kind = f"latent attention of {width} values, whole on each rank"
        if values.get("index_head_dim"):
            notes.append(
                "the model's sparse attention keeps an index of its own, which is not counted"
            )
    else:
        heads, k_size, v_size = _heads(config, values, ranks)
        per_token = layers * max(heads, ranks) * (k_size + v_size) * value_bytes
        kind = f"{heads} KV heads with K of {k_size} and V of {v_size} values"
        if ranks > heads:
            notes.append(f"with {ranks} ranks the KV heads are kept more than once")
    source = f"{config}: {layers} layers, {kind}, {value_bytes} bytes each"
    return KVShape(source, float(per_token), ranks, tuple(notes))


def _read(config: Path) -> dict[str, Any]:
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{config}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise TraceError(f"{config}:{error.lineno}: is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise TraceError(f"{config}: is not JSON: {error}") from error
    except ValueError as error:
        raise TraceError(f"{config}: is not UTF-8 text: {error}") from error
    if not isinstance(values, dict):
        raise TraceError(f"{config}: is no model's configuration, but a {type(values).__name__}")
    return values


def _number(config: Path, values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value <= MOST_COUNT:
            raise TraceError(f"{config}: {name} is {quoted(value)}, not a number above 0")
        return value
    raise TraceError(
        f"{config}: has no {' or '.join(names)}; give --bytes-per-token if this is no transformer"
    )


def _layers(config: Path, values: Mapping[str, Any], notes: list[str]) -> int:
    found = [name for name in _PER_REQUEST_KEYS if values.get(name)]
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        found += sorted({str(kind) for kind in kinds if kind in _PER_REQUEST})
    if found or values.get("is_encoder_decoder"):
        why = ", ".join(found) or "is_encoder_decoder"
        raise TraceError(
            f"{config}: the model ({why}) keeps more than K and V per token, which this cannot "
            "count; give --bytes-per-token: what an engine's blocks take, by their tokens"
        )
    layers = _number(config, values, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if isinstance(kinds, list) and len(kinds) == layers:
        windowed = sum("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
        if windowed:
            notes.append(
                f"{windowed} of {layers} layers look at a window only: their blocks are stored all "
                "the same, but of long prefixes only the last are loaded"
            )
    if not values.get("num_kv_shared_layers"):
        return layers
    shared = _number(config, values, "num_kv_shared_layers")
    if shared >= layers:
        raise TraceError(
            f"{config}: num_kv_shared_layers is {shared}, but there are {layers} layers"
        )
    return layers - shared


def _heads(config: Path, values: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """KV heads, and the values of K and of V of one."""
    heads = _number(config, values, "num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_heads = 1 if values.get("multi_query") else heads
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        if values.get(name) is not None:
            kv_heads = _number(config, values, name)
            break
    if kv_heads % ranks and ranks % kv_heads:
        raise TraceError(
            f"{config}: {kv_heads} KV heads cannot be spread over {ranks} ranks (--ranks)"
        )
    if values.get("head_dim") is not None:
        size = _number(config, values, "head_dim")
    else:
        hidden = _number(config, values, "hidden_size", "n_embd", "d_model")
        size = hidden // heads
        if not size:
            raise TraceError(f"{config}: {heads} heads cannot share a hidden size of {hidden}")
    if values.get("v_head_dim") is None:
        return kv_heads, size, size
    return kv_heads, size, _number(config, values, "v_head_dim")


def _value_bytes(config: Path, values: Mapping[str, Any], kv_dtype: str, notes: list[str]) -> int:
    if kv_dtype != "auto":
        if kv_dtype not in _VALUE_BYTES:
            raise TraceError(
                f"--kv-dtype {kv_dtype} is not known; known are auto, {', '.join(_VALUE_BYTES)}"
            )
        return _VALUE_BYTES[kv_dtype]
    quantised = values.get("quantization_config")
    scheme = quantised.get("kv_cache_scheme") if isinstance(quantised, dict) else None
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        notes.append("the checkpoint says that its KV cache has 8 bits per value")
        return 1
    said = str(values.get("dtype") or values.get("torch_dtype") or "").removeprefix("torch.")
    if said in ("float32", "float", ""):
        notes.append(
            f"the model's dtype is {said or 'not told'}; KV is counted with 2 bytes per value, as "
            "engines choose by themselves (--kv-dtype)"
        )
        return 2
    if said not in _VALUE_BYTES:
        raise TraceError(f"{config}: dtype {quoted(said)} is not known; give --kv-dtype")
    return _VALUE_BYTES[said]
