"""Keys of a request's blocks, as the engine names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from vllm.v1.kv_offload.base import make_offload_key

from tiered_kv.vllm.compat import group_keys, keys_by_token

HASHES = [b"hash %d" % number for number in range(9)]
REQUEST = cast("Any", SimpleNamespace(block_hashes=HASHES))
GROUPS = ((0, 1), (1, 4), (2, 2))
"""Index, and how many of the engine's hashes a block of the group spans."""


def named(*blocks: tuple[int, int]) -> list[bytes]:
    """Blocks by the number of hashes at whose end they are full, and the group."""
    return [bytes(make_offload_key(HASHES[end - 1], group)) for end, group in blocks]


def test_group_by_group() -> None:
    ends = [(end, 0) for end in range(1, 10)] + [(4, 1), (8, 1)] + [(2, 2), (4, 2), (6, 2), (8, 2)]
    assert group_keys(REQUEST, GROUPS) == named(*ends)


def test_as_the_tokens_fill_them() -> None:
    """What is cut at any place are all groups' blocks of a beginning of the prompt."""
    ends = [(1, 0), (2, 0), (2, 2), (3, 0), (4, 0), (4, 1), (4, 2), (5, 0), (6, 0), (6, 2), (7, 0)]
    assert keys_by_token(REQUEST, GROUPS) == named(*ends, (8, 0), (8, 1), (8, 2), (9, 0))
    assert keys_by_token(REQUEST, ((0, 1),)) == group_keys(REQUEST, ((0, 1),))
