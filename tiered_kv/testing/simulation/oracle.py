"""What the bytes of every engine block must be, and the simulated caches that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.testing.simulation.blocks import BlockHash
from tiered_kv.testing.simulation.counts import Counts
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.testing.simulation.requests import Request

__all__ = ["ContentMismatch", "Oracle", "RankCaches"]

_POISON = 0xDB
"""Every byte of an engine block that was given out and not written yet."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Words = npt.NDArray[np.uint64]


class ContentMismatch(AssertionError):
    """The engine would have read bytes that are not what was computed for these tokens."""


class RankCaches:
    """The KV caches of one rank, in host memory."""

    def __init__(self, model: SimulatedModel) -> None:
        width = model.layers * model.page_bytes if model.cross_layers else model.page_bytes
        count = 1 if model.cross_layers else model.layers
        self.tensors = tuple(
            torch.full((model.blocks, width), _POISON, dtype=torch.uint8) for _ in range(count)
        )
        self.named: dict[str, torch.Tensor] = {
            name: self.tensors[layer]
            for group in range(len(model.groups))
            for layer, name in enumerate(model.layer_names(group))
            if not model.cross_layers
        }
        """Layer name to tensor; layer i of every group has the same one."""
        page = model.page_bytes
        pages = [
            tensor.numpy()[:, start : start + page]
            for tensor in self.tensors
            for start in range(0, width, page)
        ]
        self._pages: list[npt.NDArray[np.uint8]] = pages

    def poison(self, blocks: Iterable[int]) -> None:
        """Blocks were given out: nothing in them counts any more."""
        numbers = list(blocks)
        for pages in self._pages:
            pages[numbers] = _POISON

    def copy(self, source: int, target: int) -> None:
        """Overwrite an engine block with another one's content, in all layers."""
        for pages in self._pages:
            pages[target] = pages[source]

    def words(self, layer: int, blocks: list[int], tokens: int) -> Words:
        """The words of a layer's blocks, (all their tokens, words of a token); a copy."""
        picked = self._pages[layer][blocks]
        return picked.view(np.uint64).reshape(len(blocks) * tokens, -1)

    def write(self, layer: int, block: int, first: int, tokens: int, content: Words) -> None:
        """Write tokens of one block, from its `first` on; it holds `tokens` in all."""
        page = self._pages[layer][block]
        size = page.size // tokens
        data = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
        page[first * size : first * size + data.size] = data


class Oracle:
    """Knows the content of every token's KV: a function of all tokens up to it, the layer, the
    group, the rank and the weights."""

    def __init__(self, model: SimulatedModel, counts: Counts) -> None:
        self._model = model
        self._counts = counts
        self._weights = 0
        self._salts: dict[tuple[int, int, int, int], np.uint64] = {}
        self._known: dict[int, str] = {}
        self._blocks: dict[BlockHash, tuple[str, Words]] = {}

    def change_weights(self) -> None:
        """All content is another one from now on."""
        self._weights += 1

    def learn(self, request: Request, start: int, end: int) -> None:
        """These tokens of a request exist: their content can be recognised when it is found."""
        for place, seed in enumerate(request.seeds(start, end).tolist(), start):
            self._known.setdefault(seed, f"{request.name}, token {place}")
        for number, group in enumerate(self._model.groups):
            for index in range(start // group.tokens, end // group.tokens):
                first = index * group.tokens
                seeds = request.seeds(first, first + group.tokens)
                self._blocks.setdefault(request.block_hash(number, index), (request.name, seeds))

    def content(
        self, seeds: Words, rank: int, group: int, layer: int, weights: int | None = None
    ) -> Words:
        """(tokens, words of a token)."""
        weights = self._weights if weights is None else weights
        words = self._model.page_bytes // self._model.groups[group].tokens // 8
        salt = self._salt(rank, group, layer, weights)
        with np.errstate(over="ignore"):
            steps = (np.arange(words, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
            mixed = seeds[:, None] + salt + steps[None, :]
            mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
            mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        content: Words = mixed ^ (mixed >> np.uint64(31))
        return content

    def _salt(self, rank: int, group: int, layer: int, weights: int) -> np.uint64:
        key = (rank, group, layer, weights)
        if key not in self._salts:
            digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
            self._salts[key] = np.uint64(int.from_bytes(digest, "big"))
        return self._salts[key]

    def block_bytes(self, request: Request, rank: int, group: int, index: int) -> bytes:
        """A whole block of a request as it lies in a host slot or in a store: engine block by
        engine block, and in each layer by layer."""
        shape = self._model.groups[group]
        tokens = self._model.chunk_tokens(group)
        seeds = request.seeds(index * tokens, (index + 1) * tokens)
        layers = [
            self.content(seeds, rank, group, layer).reshape(self._model.chunk, -1)
            for layer in range(shape.layers)
        ]
        return np.concatenate(layers, axis=1).tobytes()

    def compute(
        self, request: Request, start: int, end: int, caches: RankCaches, rank: int
    ) -> None:
        """Write what the model computes for the tokens from `start` up to `end`."""
        seeds = request.seeds(start, end)
        for number, group in enumerate(self._model.groups):
            for layer in range(group.layers):
                content = self.content(seeds, rank, number, layer)
                position = start
                while position < end:
                    index, first = divmod(position, group.tokens)
                    stop = min(end, (index + 1) * group.tokens)
                    piece = content[position - start : stop - start]
                    block = request.tables[number][index]
                    caches.write(layer, block, first, group.tokens, piece)
                    position = stop

    def check(self, request: Request, upto: int, caches: RankCaches, rank: int) -> None:
        """Compare what computing the token at `upto` reads.

        Raises:
            ContentMismatch: a byte differs.
        """
        for number, group in enumerate(self._model.groups):
            first = group.first_needed(upto)
            table = request.tables[number][first : -(-upto // group.tokens)]
            if not table:
                continue
            start = first * group.tokens
            seeds = request.seeds(start, upto)
            for layer in range(group.layers):
                found = caches.words(layer, table, group.tokens)[: upto - start]
                self._compare(request.name, seeds, found, (rank, number, layer), table)

    def check_block(self, name: BlockHash, block: int, caches: RankCaches, rank: int) -> None:
        """Compare a block that is found by its hash, in all layers.

        Raises:
            ContentMismatch: a byte differs.
        """
        number = name[0]
        owner, seeds = self._blocks[name]
        group = self._model.groups[number]
        for layer in range(group.layers):
            found = caches.words(layer, [block], group.tokens)
            self._compare(owner, seeds, found, (rank, number, layer), [block])

    def _compare(
        self, owner: str, seeds: Words, found: Words, place: tuple[int, int, int], table: list[int]
    ) -> None:
        self._counts.checked_blocks += len(table)
        expected = self.content(seeds, *place)
        if np.array_equal(expected, found):
            return
        rank, number, layer = place
        token = int(np.flatnonzero((expected != found).any(axis=1))[0])
        block = table[token // self._model.groups[number].tokens]
        wanted = self._known.get(int(seeds[token]), "?")
        raise ContentMismatch(
            f"request {owner} reads wrong bytes: engine block {block} (rank {rank}, group "
            f"{number}, layer {layer}) must hold the KV of {wanted}, but holds "
            f"{self._owner(found[token])}"
        )

    def _owner(self, words: Words) -> str:
        """Whose content this is."""
        if (words.view(np.uint8) == _POISON).all():
            return "nothing: it was not written since it was given out"
        seeds = np.array(list(self._known), np.uint64)
        for rank, number, layer, weights in list(self._salts):
            content = self.content(seeds, rank, number, layer, weights)
            if content.shape[1] != words.size:
                continue
            hits = np.flatnonzero((content == words).all(axis=1))
            if hits.size:
                name = self._known[int(seeds[hits[0]])]
                old = "" if weights == self._weights else ", of older weights"
                return f"that of {name} (rank {rank}, group {number}, layer {layer}{old})"
        return f"bytes that nobody computed: {words.tobytes()[:16].hex()}..."
