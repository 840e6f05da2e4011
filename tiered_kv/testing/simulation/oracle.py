"""What the bytes of every engine block must be, and the simulated caches that hold them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tiered_kv.testing.simulation.blocks import BlockHash
from tiered_kv.testing.simulation.counts import Counts
from tiered_kv.testing.simulation.model import SimulatedModel
from tiered_kv.testing.simulation.requests import Request, Share

__all__ = ["ContentMismatch", "Oracle", "RankCaches"]

_POISON = 0xDB
"""Every byte of an engine block that was given out and not written yet."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)

Words = npt.NDArray[np.uint64]


class ContentMismatch(AssertionError):
    """The engine would have read bytes that are not what was computed for these tokens."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where tokens lie in the engine blocks of a group."""

    blocks: npt.NDArray[np.intp]
    """Of each token."""
    offsets: npt.NDArray[np.intp]
    """Of each token, in its block."""

    @classmethod
    def of(cls, tokens: int, pieces: Iterable[tuple[list[int], int, int]]) -> Places:
        """For each (table, first, end), the tokens from `first` up to `end` of a request whose
        engine blocks of `tokens` tokens are `table`."""
        blocks: list[npt.NDArray[np.intp]] = []
        offsets: list[npt.NDArray[np.intp]] = []
        for table, first, end in pieces:
            places = np.arange(first, end)
            blocks.append(np.array(table, np.intp)[places // tokens])
            offsets.append(places % tokens)
        return cls(np.concatenate(blocks), np.concatenate(offsets))


class RankCaches:
    """The KV caches of one rank, in host memory."""

    def __init__(self, model: SimulatedModel) -> None:
        if model.cross_layers:
            whole = torch.full(
                (model.blocks, model.layers * model.page_bytes), _POISON, dtype=torch.uint8
            )
            self.tensors: tuple[torch.Tensor, ...] = (whole,)
            pages = whole.numpy().reshape(model.blocks, model.layers, -1).swapaxes(0, 1)
        else:
            whole = torch.full(
                (model.layers, model.blocks, model.page_bytes), _POISON, dtype=torch.uint8
            )
            self.tensors = tuple(whole)
            pages = whole.numpy()
        self.named: dict[str, torch.Tensor] = {
            name: self.tensors[layer]
            for group in range(len(model.groups))
            for layer, name in enumerate(model.layer_names(group))
            if not model.cross_layers
        }
        """Layer name to tensor; layer i of every group has the same one."""
        self._pages: npt.NDArray[np.uint8] = pages
        """(layer, block, bytes), in the tensors' own memory."""
        self._words: list[Words] = [
            pages.view(np.uint64).reshape(model.layers, model.blocks, group.tokens, -1)[
                : group.layers
            ]
            for group in model.groups
        ]
        """By group: (layer, block, token, words), in the same memory."""

    def poison(self, blocks: Iterable[int]) -> None:
        """Blocks were given out: nothing in them counts any more."""
        self._pages[:, list(blocks)] = _POISON

    def copy(self, source: int, target: int) -> None:
        """Overwrite an engine block with another one's content, in all layers."""
        self._pages[:, target] = self._pages[:, source]

    def read(self, group: int, places: Places) -> Words:
        """(layers of the group, tokens, words of a token); a copy."""
        found: Words = self._words[group][:, places.blocks, places.offsets]
        return found

    def write(self, group: int, places: Places, content: Words) -> None:
        """Write tokens in all layers of a group; `content` is what `read` gives."""
        self._words[group][:, places.blocks, places.offsets] = content


class Oracle:
    """Knows the content of every token's KV: a function of all tokens up to it, the layer, the
    group, the rank and the weights."""

    def __init__(self, model: SimulatedModel, counts: Counts) -> None:
        self._model = model
        self._counts = counts
        self._weights = 0
        self._salts: dict[tuple[int, int, int], Words] = {}
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

    def content(self, seeds: Words, rank: int, group: int, weights: int | None = None) -> Words:
        """(layers of the group, tokens, words of a token)."""
        weights = self._weights if weights is None else weights
        salts = self._salts_of(rank, group, weights)
        with np.errstate(over="ignore"):
            mixed = seeds[None, :, None] + salts
            mixed ^= mixed >> _SHIFT_1
            mixed *= _MIX_1
            mixed ^= mixed >> _SHIFT_2
            mixed *= _MIX_2
            mixed ^= mixed >> _SHIFT_3
        return mixed

    def _salts_of(self, rank: int, group: int, weights: int) -> Words:
        """(layers of the group, 1, words of a token)."""
        key = (rank, group, weights)
        if key not in self._salts:
            shape = self._model.groups[group]
            salts = np.array(
                [_salt(rank, group, layer, weights) for layer in range(shape.layers)], np.uint64
            )
            words = self._model.page_bytes // shape.tokens // 8
            steps = np.arange(1, words + 1, dtype=np.uint64)
            with np.errstate(over="ignore"):
                self._salts[key] = salts[:, None, None] + steps * _GOLDEN
        return self._salts[key]

    def block_bytes(self, request: Request, rank: int, group: int, index: int) -> bytes:
        """A whole block of a request as it lies in a host slot or in a store: engine block by
        engine block, and in each layer by layer."""
        tokens = self._model.chunk_tokens(group)
        seeds = request.seeds(index * tokens, (index + 1) * tokens)
        layers = self.content(seeds, rank, group)
        return layers.reshape(len(layers), self._model.chunk, -1).swapaxes(0, 1).tobytes()

    def compute(self, shares: Sequence[Share], caches: RankCaches, rank: int) -> None:
        """Write what the model computes for the tokens of these shares."""
        for number, group in enumerate(self._model.groups):
            pieces = [(s.request.tables[number], s.start, s.end) for s in shares]
            places = Places.of(group.tokens, pieces)
            seeds = np.concatenate([s.request.seeds(s.start, s.end) for s in shares])
            caches.write(number, places, self.content(seeds, rank, number))

    def check(self, shares: Sequence[Share], caches: RankCaches, rank: int) -> None:
        """Compare what computing the first token of each share reads.

        Raises:
            ContentMismatch: a byte differs.
        """
        for number, group in enumerate(self._model.groups):
            read = [
                _Read(share.request.name, share.request.tables[number], first, share.start, seeds)
                for share in shares
                if (first := group.first_needed(share.start) * group.tokens) < share.start
                for seeds in (share.request.seeds(first, share.start),)
            ]
            self._compare(number, read, caches, rank)

    def check_blocks(self, blocks: Mapping[int, BlockHash], caches: RankCaches, rank: int) -> None:
        """Compare blocks that are found by their hashes, in all layers.

        Raises:
            ContentMismatch: a byte differs.
        """
        for number, group in enumerate(self._model.groups):
            read = [
                _Read(owner, [block], 0, group.tokens, seeds)
                for block, name in blocks.items()
                if name[0] == number
                for owner, seeds in (self._blocks[name],)
            ]
            self._compare(number, read, caches, rank)

    def _compare(self, number: int, read: Sequence[_Read], caches: RankCaches, rank: int) -> None:
        if not read:
            return
        group = self._model.groups[number]
        places = Places.of(group.tokens, [(one.table, one.first, one.end) for one in read])
        found = caches.read(number, places)
        expected = self.content(np.concatenate([one.seeds for one in read]), rank, number)
        blocks = sum(-(-one.end // group.tokens) - one.first // group.tokens for one in read)
        self._counts.checked_blocks += blocks * group.layers
        if np.array_equal(expected, found):
            return
        layer, token = np.argwhere((expected != found).any(axis=2))[0].tolist()
        owners = [one for one in read for _ in range(one.first, one.end)]
        seeds = [int(seed) for one in read for seed in one.seeds]
        wanted = self._known.get(seeds[token], "?")
        raise ContentMismatch(
            f"request {owners[token].owner} reads wrong bytes: engine block "
            f"{places.blocks[token]} (rank {rank}, group {number}, layer {layer}) must hold the KV "
            f"of {wanted}, but holds {self._owner(found[layer, token])}"
        )

    def _owner(self, words: Words) -> str:
        """Whose content this is."""
        if (words.view(np.uint8) == _POISON).all():
            return "nothing: it was not written since it was given out"
        seeds = np.array(list(self._known), np.uint64)
        for rank, number, weights in list(self._salts):
            content = self.content(seeds, rank, number, weights)
            if content.shape[2] != words.size:
                continue
            hits = np.argwhere((content == words).all(axis=2)).tolist()
            if hits:
                layer, place = hits[0]
                name = self._known[int(seeds[place])]
                old = "" if weights == self._weights else ", of older weights"
                return f"that of {name} (rank {rank}, group {number}, layer {layer}{old})"
        return f"bytes that nobody computed: {words.tobytes()[:16].hex()}..."


@dataclass(frozen=True, slots=True)
class _Read:
    """Tokens that are read, and what they must be."""

    owner: str
    table: list[int]
    first: int
    end: int
    seeds: Words


def _salt(rank: int, group: int, layer: int, weights: int) -> int:
    digest = hashlib.blake2b(repr((rank, group, layer, weights)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big")
