"""The simulated engine's block pool: reference counts, reuse, and its own prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["NULL_BLOCK", "BlockHash", "BlockPool"]

NULL_BLOCK = 0
"""Stands in a table where a block is not needed (any more)."""

BlockHash = tuple[int, bytes]
"""KV group, and the digest of all tokens up to the block's end."""


class BlockPool:
    """Engine blocks by number. A freed block keeps its content, and can be found by its hash,
    until it is given out again: the one that was freed longest ago first."""

    def __init__(self, blocks: int) -> None:
        """Blocks 1 to `blocks - 1` can be given out."""
        self.blocks = blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._references = [0] * blocks
        self._hash_of: dict[int, BlockHash] = {}
        self._by_hash: dict[BlockHash, int] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def find(self, name: BlockHash) -> int | None:
        """The block with this content."""
        return self._by_hash.get(name)

    def known(self) -> dict[int, BlockHash]:
        """What is found by its hash, by block."""
        return dict(self._hash_of)

    def take(self, found: Iterable[int]) -> None:
        """Use blocks that were found."""
        for block in found:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Give out blocks whose content is forgotten; None where there are too few."""
        if count > len(self._free):
            return None
        given = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in given:
            self._references[block] = 1
            self._forget(block)
        return given

    def release(self, blocks: Iterable[int]) -> None:
        """End one use of each block. Give the blocks of a prefix last block first, so that its
        beginning is found longest.

        Raises:
            RuntimeError: a block is released more often than it was taken.
        """
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._references[block] < 1:
                raise RuntimeError(f"engine block {block} is released, but nobody uses it")
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def remember(self, block: int, name: BlockHash) -> None:
        """A block is full: it can be found from now on, unless another one can already."""
        if block != NULL_BLOCK and block not in self._hash_of and name not in self._by_hash:
            self._hash_of[block] = name
            self._by_hash[name] = block

    def forget_all(self) -> None:
        """Find nothing that is there now."""
        self._hash_of.clear()
        self._by_hash.clear()

    def _forget(self, block: int) -> None:
        name = self._hash_of.pop(block, None)
        if name is not None:
            del self._by_hash[name]

    def audit(self) -> tuple[str, ...]:
        """What is wrong once nobody uses a block any more; empty where all is free."""
        used = [block for block, count in enumerate(self._references) if count]
        if not used and len(self._free) == self.blocks - 1:
            return ()
        return (f"{len(self._free)} of {self.blocks - 1} engine blocks are free; in use: {used}",)
