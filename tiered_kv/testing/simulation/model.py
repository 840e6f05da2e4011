"""The shape of the model that a simulated engine pretends to run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiered_kv.values import Fingerprint

__all__ = ["SimulatedGroup", "SimulatedModel"]

_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A KV group: layers that keep their KV alike."""

    layers: int = 2
    tokens: int = 4
    """Per engine block."""
    window: int | None = None
    """How many tokens, its own among them, a token attends to; None: all before it."""

    def first_needed(self, position: int) -> int:
        """Index of the first engine block that computing the token at `position` reads."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.tokens


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Shape of the KV cache. As in vLLM, all groups take their engine blocks from one pool, and
    layer i of every group lies in the same tensor.

    Raises:
        ValueError: the numbers do not fit together.
    """

    groups: tuple[SimulatedGroup, ...] = (SimulatedGroup(),)
    ranks: int = 1
    """Tensor-parallel ranks; each holds other bytes of every block."""
    chunk: int = 1
    """Engine blocks per block."""
    blocks: int = 64
    """Engine blocks of the pool; block 0 is never given out."""
    page_bytes: int = 256
    """Bytes of one engine block in one layer."""
    cross_layers: bool = False
    """Whether one tensor holds all layers (`register_cross_layers_kv_cache`)."""
    name: str = "simulated"

    def __post_init__(self) -> None:
        if min(self.ranks, self.chunk, self.blocks - 1, len(self.groups)) < 1:
            raise ValueError(
                "a model needs a group, a rank, a chunk of 1 and blocks beside block 0"
            )
        for group in self.groups:
            window = 1 if group.window is None else group.window
            if min(group.layers, group.tokens, window) < 1:
                raise ValueError(f"{group} has no layers, no tokens or no window")
            if self.page_bytes % (group.tokens * _WORD_BYTES):
                raise ValueError(
                    f"a page of {self.page_bytes} bytes cannot be cut into {group.tokens} tokens "
                    f"of whole {_WORD_BYTES}-byte words"
                )
        if self.cross_layers and len(self.groups) > 1:
            raise ValueError("one tensor for all layers is for models with one KV group")

    def engine_blocks(self, tokens: int) -> int:
        """Engine blocks that so many tokens of one request take, all groups together."""
        return sum(-(-tokens // group.tokens) for group in self.groups)

    @property
    def most_tokens(self) -> int:
        """Longest request, prompt and answer together, that the pool holds for sure."""
        tokens = self.blocks * max(group.tokens for group in self.groups)
        while self.engine_blocks(tokens) > self.blocks - 1:
            tokens -= 1
        return tokens

    def chunk_tokens(self, group: int) -> int:
        """Tokens per block of a group."""
        return self.groups[group].tokens * self.chunk

    @property
    def device_alignment(self) -> int:
        """Tokens that a hit in the engine's own cache is a multiple of."""
        return math.lcm(*(group.tokens for group in self.groups))

    @property
    def tier_alignment(self) -> int:
        """Tokens that the end of a load is a multiple of."""
        return self.device_alignment * self.chunk

    @property
    def layers(self) -> int:
        """Number of tensors where each holds a layer of every group."""
        return max(group.layers for group in self.groups)

    def layer_names(self, group: int) -> tuple[str, ...]:
        """Names of a group's layers."""
        return tuple(f"group{group}.layer{layer}" for layer in range(self.groups[group].layers))

    @property
    def fingerprint(self) -> Fingerprint:
        """What determines the bytes of a block, but for the weights."""
        return Fingerprint.of(
            {
                "model": self.name,
                "groups": repr(self.groups),
                "ranks": self.ranks,
                "chunk": self.chunk,
                "page_bytes": self.page_bytes,
                "cross_layers": self.cross_layers,
            }
        )
