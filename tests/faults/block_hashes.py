"""Child process: what vLLM names the blocks of a prompt, with each of its hash functions, and
whether tiered-kv lets tiers that last be used with it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tiered_kv.errors import UnsupportedError
from tiered_kv.vllm.compat import check_flags, none_hash_seed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
TOKENS = 64
BLOCK_TOKENS = 16


def settings(algorithm: str) -> VllmConfig:
    """Right but for the hash function."""
    cache = {
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": algorithm,
        "calculate_kv_scales": False,
    }
    return cast(
        "VllmConfig",
        SimpleNamespace(
            kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
            cache_config=SimpleNamespace(**cache),
        ),
    )


def names(algorithm: str) -> list[str]:
    """Of the blocks of one prompt."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(TOKENS)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, function),
    )
    return [block.hex() for block in request.block_hashes]


def told(algorithm: str) -> dict[str, object]:
    """All about one hash function."""
    try:
        check_flags(settings(algorithm), persistent=True)
        refusal = ""
    except UnsupportedError as error:
        refusal = str(error)
    return {"names": names(algorithm), "refusal": refusal, "seed": none_hash_seed()}


if __name__ == "__main__":
    print(json.dumps({algorithm: told(algorithm) for algorithm in ALGORITHMS}))
