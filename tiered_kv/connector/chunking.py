"""How many engine blocks make one block of ours."""

from __future__ import annotations

__all__ = ["auto_chunk"]

BLOCK_BYTES = 2**20
"""`chunk: auto` takes the fewest engine blocks that reach this many bytes per rank ..."""
BLOCK_TOKENS = 256
"""... and no more tokens than this."""


def auto_chunk(engine_block_bytes: int, engine_block_tokens: int) -> int:
    """Engine blocks per block for `chunk: auto`.

    Args:
        engine_block_bytes: of an engine block on one rank, all layers of all KV groups.
        engine_block_tokens: tokens of an engine block, of the group whose blocks have most.
    """
    wanted = -(-BLOCK_BYTES // max(1, engine_block_bytes))
    return max(1, min(wanted, BLOCK_TOKENS // engine_block_tokens))
