"""The engine's KV caches as bytes: what gpu handlers copy from and to.

Only layouts that are understood are taken: dimension 0 counts the engine's blocks, and all bytes
of one block lie together. How the bytes are ordered inside a block does not matter here; it is
part of the fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tiered_kv.errors import UnsupportedError
from tiered_kv.memory.device import device_of

__all__ = ["CacheRef", "KVCaches"]


@dataclass(frozen=True, slots=True)
class CacheRef:
    """The part of a KV group that lies in one tensor."""

    tensor_index: int
    page_bytes: int
    """Bytes per engine block, from the beginning of the tensor's row; padding behind them is
    neither stored nor loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCaches:
    """The KV caches of one rank. Checked when made; keeps the tensors alive.

    Raises:
        UnsupportedError: a tensor or a reference has a shape, stride, dtype or device that is not
            understood; the text says which and why.
    """

    tensors: tuple[torch.Tensor, ...]
    """int8, (engine blocks, bytes per engine block); rows are contiguous, may be further apart
    than they are long, and do not overlap."""
    groups: tuple[tuple[CacheRef, ...], ...]
    """Per KV group, in the order of `CacheGeometry.groups`, its tensors in layer order."""

    def __post_init__(self) -> None:
        if not self.tensors or not self.groups:
            raise UnsupportedError("the engine registered no KV cache: no tensor or no KV group")
        for index, tensor in enumerate(self.tensors):
            problem = _problem_of_rows(tensor, self.tensors[0])
            if problem:
                raise UnsupportedError(f"KV cache tensor {index} {problem}")
        for number, refs in enumerate(self.groups):
            if not refs:
                raise UnsupportedError(f"KV group {number} has no KV cache tensor")
            for ref in refs:
                self._check_ref(number, ref)

    def _check_ref(self, group: int, ref: CacheRef) -> None:
        if not 0 <= ref.tensor_index < len(self.tensors):
            raise UnsupportedError(
                f"KV group {group} refers to tensor {ref.tensor_index} of {len(self.tensors)}"
            )
        width = self.tensors[ref.tensor_index].shape[1]
        if not 0 < ref.page_bytes <= width:
            raise UnsupportedError(
                f"KV group {group} wants {ref.page_bytes} bytes per block of tensor "
                f"{ref.tensor_index}, whose rows have {width}"
            )

    @classmethod
    def from_named(
        cls,
        caches: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[str]],
        *,
        num_blocks: int | None = None,
    ) -> Self:
        """Build from the tensors as engines keep them: any dtype, dimension 0 counts blocks.

        Args:
            caches: layer name to tensor; layers that no group names are left out.
            groups: layer names per KV group. A name may occur in several groups.
            num_blocks: engine blocks that dimension 0 must have, where the caller knows it.

        Raises:
            UnsupportedError: see the class; or a group names a layer without a tensor.
        """
        rows: list[torch.Tensor] = []
        index_of: dict[str, int] = {}
        refs: list[tuple[CacheRef, ...]] = []
        for number, names in enumerate(groups):
            of_group: list[CacheRef] = []
            for name in names:
                if name not in index_of:
                    if name not in caches:
                        raise UnsupportedError(
                            f"KV group {number} names layer {name!r}, for which the engine "
                            "registered no KV cache"
                        )
                    rows.append(_block_rows(name, caches[name], num_blocks))
                    index_of[name] = len(rows) - 1
                index = index_of[name]
                of_group.append(CacheRef(index, rows[index].shape[1]))
            refs.append(tuple(of_group))
        return cls(tuple(rows), tuple(refs))

    @classmethod
    def on_host(cls, blocks: int, block_bytes: int) -> Self:
        """A cache of one group in host memory, all bytes 0: what a self-test uses in place of an
        engine's."""
        rows = torch.zeros((blocks, block_bytes), dtype=torch.int8)
        return cls((rows,), ((CacheRef(0, block_bytes),),))

    @property
    def num_blocks(self) -> int:
        """Engine blocks in each tensor."""
        return self.tensors[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.tensors[0].device

    def fence(self) -> object | None:
        """What `TransferSpec.after` carries: the point behind all that the calling thread has
        given its current stream of the device so far. None where the caches are in host memory:
        there is nothing to wait for.

        Raises:
            UnsupportedError: the caches are on a device that is not supported.
        """
        device = device_of(self.device)
        return None if device is None else device.fence()

    def block_bytes(self, group: int, chunk: int) -> int:
        """Bytes of one block of `chunk` engine blocks of `groups[group]`."""
        return chunk * sum(ref.page_bytes for ref in self.groups[group])


def _problem_of_rows(tensor: torch.Tensor, first: torch.Tensor) -> str | None:
    """Why a tensor cannot be one of `KVCaches.tensors`, or None."""
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; expected a strided one"
    if tensor.dtype is not torch.int8:
        return f"has the dtype {tensor.dtype}; expected int8 (see KVCaches.from_named)"
    if tensor.dim() != 2 or 0 in tensor.shape:
        return f"has the shape {tuple(tensor.shape)}; expected (blocks, bytes per block)"
    blocks, width = tensor.shape
    if width > 1 and tensor.stride(1) != 1:
        return f"has rows that are not contiguous (strides {tensor.stride()})"
    if blocks > 1 and tensor.stride(0) < width:
        return f"has rows that overlap (shape {tuple(tensor.shape)}, strides {tensor.stride()})"
    if blocks != first.shape[0]:
        return f"has {blocks} blocks, but tensor 0 has {first.shape[0]}"
    if tensor.device != first.device:
        return f"is on {tensor.device}, but tensor 0 is on {first.device}"
    return None


def _block_rows(name: str, tensor: torch.Tensor, num_blocks: int | None) -> torch.Tensor:
    """The same memory as int8 (blocks, bytes per block).

    Raises:
        UnsupportedError: the bytes of a block do not lie together.
    """
    shown = f"KV cache of {name!r} (shape {tuple(tensor.shape)}, {tensor.dtype}"
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{shown}) has the layout {tensor.layout}; expected a strided one")
    shown += f", strides {tensor.stride()})"
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise UnsupportedError(f"{shown} has no dimension of blocks with something in it")
    blocks = tensor.shape[0]
    if num_blocks is not None and blocks != num_blocks:
        raise UnsupportedError(
            f"{shown} has {blocks} entries in dimension 0; expected {num_blocks}, one per block: "
            "this attention layout is not supported"
        )
    inner = [(tensor.stride(d), tensor.shape[d]) for d in range(1, tensor.dim())]
    dense = 1
    for stride, size in sorted(pair for pair in inner if pair[1] > 1):
        if stride != dense:
            raise UnsupportedError(
                f"{shown} does not keep the bytes of one block together: "
                "this attention layout is not supported"
            )
        dense *= size
    if blocks > 1 and tensor.stride(0) < dense:
        raise UnsupportedError(f"{shown} has blocks that overlap")
    item = tensor.element_size()
    row = tensor.stride(0) * item if blocks > 1 else dense * item
    return torch.empty(0, dtype=torch.int8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * item, (blocks, dense * item), (row, 1)
    )
