"""A request of the simulated engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from tiered_kv.testing.simulation.blocks import NULL_BLOCK
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.values import BlockKey

__all__ = ["Phase", "Request", "Share"]

_DIGEST_BYTES = 16
_VOCABULARY = 50_000


class Phase(Enum):
    """What a request is doing."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"

    @property
    def over(self) -> bool:
        """Whether nothing will be computed for it any more."""
        return self in (Phase.FINISHED, Phase.ABORTED)


@dataclass(slots=True, eq=False)
class Request:
    """Its tokens, what is computed of them, and in which engine blocks that lies."""

    name: str
    model: SimulatedModel
    prompt: tuple[int, ...]
    answer: int
    """Tokens to generate."""
    tiers: frozenset[str] | None = None
    """Tiers that may answer it; None: all."""
    priority: int = 0
    """Lower ones are served first, and preempted last, where the engine goes by priorities."""
    arrival: int = 0
    """How many requests were added before it."""
    arrived: float = 0.0
    """When it was added, in seconds of the simulation's time."""
    first_token: float | None = None
    """When the first token of its answer was there."""
    ended: float | None = None
    """When it was over."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens whose KV lies in the tables' blocks."""
    tables: list[list[int]] = field(default_factory=list)
    """Per group, its engine blocks in order."""
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of all tokens up to each position."""
    loaded_tokens: int = 0
    """Of the load that runs."""
    load_sources: dict[BlockKey, str] = field(default_factory=dict)
    """Tier that each block of the load that runs comes from."""

    def __post_init__(self) -> None:
        self.tables = [[] for _ in self.model.groups]
        for token in self.prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """One token more."""
        before = self.digests[-1] if self.digests else b""
        digest = hashlib.blake2b(before + token.to_bytes(4, "big"), digest_size=_DIGEST_BYTES)
        self.tokens.append(token)
        self.digests.append(digest.digest())

    def generate(self) -> None:
        """Append what the model says next: the same after the same tokens."""
        self.append(int.from_bytes(self.digests[-1][:4], "big") % _VOCABULARY)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens that were generated so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def answered(self) -> bool:
        """Whether all tokens are generated."""
        return len(self.tokens) - len(self.prompt) >= self.answer

    def seeds(self, start: int, end: int) -> npt.NDArray[np.uint64]:
        """What the content of the tokens from `start` up to `end` is made from."""
        joined = b"".join(self.digests[start:end])
        words = np.frombuffer(joined, np.uint64).reshape(end - start, -1)
        first: npt.NDArray[np.uint64] = words[:, 0].copy()
        return first

    def block_hash(self, group: int, index: int) -> tuple[int, bytes]:
        """Hash of a full engine block of a group."""
        return group, self.digests[(index + 1) * self.model.groups[group].tokens - 1]

    def key(self, group: int, index: int) -> BlockKey:
        """Key of a whole block of a group."""
        digest = self.digests[(index + 1) * self.model.chunk_tokens(group) - 1]
        return BlockKey(digest + group.to_bytes(4, "big"))

    def keys(self, group: int) -> list[BlockKey]:
        """Keys of all whole blocks of a group, whether computed or not."""
        whole = self.length // self.model.chunk_tokens(group)
        return [self.key(group, index) for index in range(whole)]

    def used_blocks(self) -> list[int]:
        """Engine blocks in the order in which they are best freed."""
        return [block for table in self.tables for block in reversed(table) if block != NULL_BLOCK]

    def forget_blocks(self) -> list[int]:
        """Start from nothing; the blocks that it had."""
        blocks = self.used_blocks()
        self.tables = [[] for _ in self.model.groups]
        self.computed = 0
        return blocks


@dataclass(frozen=True, slots=True)
class Share:
    """What of a request is computed in a step."""

    request: Request
    start: int
    end: int

    @property
    def decodes(self) -> bool:
        """Whether it is the next token after the newest one of an answer."""
        request = self.request
        return self.start == request.length - 1 and request.length > len(request.prompt)
