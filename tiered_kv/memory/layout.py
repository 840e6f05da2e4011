"""How a block lies in a host slot, in an area of device staging and on disk.

```
block         = engine block 0 | engine block 1 | ... | engine block chunk-1
engine block  = page of reference 0 | page of reference 1 | ...     (references of the KV group)
page          = the first `page_bytes` of the tensor's row, in memory order
```

Nothing lies between the parts. Blocks on disk have this layout too: changing it means a new
`tiered_kv.values.FORMAT_VERSION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_kv.errors import IdentityError
from tiered_kv.memory.caches import KVCaches
from tiered_kv.specs import GpuBlock
from tiered_kv.values import CacheGeometry

__all__ = ["GroupLayout", "PageSpan", "layouts_of"]


@dataclass(frozen=True, slots=True)
class PageSpan:
    """One page inside an engine block's bytes."""

    tensor_index: int
    offset: int
    """Bytes from the beginning of the engine block."""
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layout of the blocks of one KV group."""

    group: int
    """KV group number, as the engine counts them."""
    chunk: int
    """Engine blocks per block."""
    engine_block_bytes: int
    num_blocks: int
    """Engine blocks in the cache."""
    pages: tuple[PageSpan, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one whole block."""
        return self.chunk * self.engine_block_bytes

    def problem_of(self, block: GpuBlock) -> str | None:
        """Why `block` names no part of a block of this group, or None."""
        if block.first < 0 or block.first + len(block.block_ids) > self.chunk:
            return (
                f"it has {len(block.block_ids)} engine blocks from {block.first} on; "
                f"a block has {self.chunk}"
            )
        outside = [i for i in block.block_ids if not 0 <= i < self.num_blocks]
        if outside:
            return f"engine block {outside[0]} is outside the cache of {self.num_blocks}"
        return None

    def problem_of_whole(self, block: GpuBlock) -> str | None:
        """Why `block` is not one whole block of this group, or None."""
        if block.first or len(block.block_ids) != self.chunk:
            return (
                f"it has {len(block.block_ids)} engine blocks from {block.first} on; "
                f"only whole blocks of {self.chunk} are stored"
            )
        return self.problem_of(block)


def layouts_of(caches: KVCaches, geometry: CacheGeometry) -> Mapping[int, GroupLayout]:
    """The layout of each KV group, by group number.

    Raises:
        IdentityError: the caches are not what the geometry says.
    """
    if len(caches.groups) != len(geometry.groups):
        raise IdentityError(
            f"the engine registered {len(caches.groups)} KV groups, but the manager's geometry "
            f"has {len(geometry.groups)}"
        )
    layouts: dict[int, GroupLayout] = {}
    for refs, group in zip(caches.groups, geometry.groups, strict=True):
        pages: list[PageSpan] = []
        offset = 0
        for ref in refs:
            pages.append(PageSpan(ref.tensor_index, offset, ref.page_bytes))
            offset += ref.page_bytes
        layout = GroupLayout(group.index, group.chunk, offset, caches.num_blocks, tuple(pages))
        if layout.block_bytes != group.block_bytes:
            raise IdentityError(
                f"a block of KV group {group.index} has {layout.block_bytes} bytes in the "
                f"registered caches ({group.chunk} x {offset}), but {group.block_bytes} in the "
                "manager's geometry; both halves must describe the same cache"
            )
        layouts[group.index] = layout
    return layouts
