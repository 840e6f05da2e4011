"""`tiered-kv warm --keep`: what was stored is evicted after everything else, for a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiered_kv.cli.tending import StoreTier
from tiered_kv.errors import ConfigError, TieredKVError

if TYPE_CHECKING:
    from tiered_kv.contracts import BlockStore, KeepsBlocks, StoredNamespace
    from tiered_kv.values import BlockKey, CacheGeometry

__all__ = [
    "Keeping",
    "Kept",
    "keep",
    "keep_stored",
    "kept_text",
    "require_keeper",
    "require_keeping",
]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is asked for."""

    seconds: float
    share: float
    """Of the tier's capacity, what kept blocks may take at most; 0 to 1."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What became of it in one tier."""

    blocks: int
    """That are kept now, of those that were to be."""
    asked: int
    most: int
    """Blocks that the share allows, those kept before included."""
    keeping: Keeping
    why: str = ""
    """Why the tier keeps none; empty where it does."""


def require_keeping(tiers: Iterable[StoreTier]) -> None:
    """Refuse tiers that cannot keep blocks, before the work; one that holds nothing yet cannot be
    asked.

    Raises:
        ConfigError: a store of this kind keeps none.
        TierError: a tier does not work.
    """
    for tier in tiers:
        for stored in tier.namespaces()[:1]:
            with tier.store(stored, 0) as store:
                require_keeper(store, tier)


def keep(
    store: BlockStore,
    tier: StoreTier,
    geometry: CacheGeometry,
    keys: Sequence[BlockKey],
    keeping: Keeping,
) -> Kept:
    """Keep blocks of an open store; the first of `keys` where there is not room for all.

    Raises:
        ConfigError: a store of this kind keeps none.
        TierError: the store does not work.
    """
    keeper = require_keeper(store, tier)
    block_bytes = max(group.block_bytes for group in geometry.groups) * geometry.world_size
    most = int(keeping.share * int(tier.settings.capacity) / block_bytes)
    return Kept(keeper.keep(keys, keeping.seconds, most), len(keys), most, keeping)


def require_keeper(store: BlockStore, tier: StoreTier) -> KeepsBlocks:
    """An open store of a tier as one that keeps blocks.

    Raises:
        ConfigError: stores of this kind keep none.
    """
    from tiered_kv.contracts import KeepsBlocks

    if not isinstance(store, KeepsBlocks):
        raise ConfigError(
            f"--keep: stores of type {tier.settings.type} (tier {tier.name!r}) cannot keep blocks; "
            "leave it out, or name other tiers with --tier"
        )
    return store


def keep_stored(
    tiers: Sequence[StoreTier], namespace: bytes, keys: Sequence[BlockKey], keeping: Keeping
) -> Mapping[str, Kept]:
    """The same in closed tiers, of a namespace by its id; by tier. What a tier cannot keep is told
    in the answer: the blocks are stored by now."""
    done: dict[str, Kept] = {}
    for tier in tiers:
        try:
            stored = _of(tier, namespace)
            if stored is None:
                raise ConfigError(f"tier {tier.name!r} holds none of them")
            with tier.store(stored, 0, writable=True) as store:
                done[tier.name] = keep(store, tier, stored.geometry, keys, keeping)
        except TieredKVError as error:
            done[tier.name] = Kept(0, len(keys), 0, keeping, str(error))
    return done


def _of(tier: StoreTier, namespace: bytes) -> StoredNamespace | None:
    return next((one for one in tier.namespaces() if one.namespace.id == namespace), None)


def kept_text(kept: Kept) -> str:
    """For people."""
    from tiered_kv.cli.warming import duration_text

    if kept.why:
        return f"no blocks kept: {kept.why}"
    keeping = kept.keeping
    whole = "" if kept.blocks == kept.asked else f" of {kept.asked}"
    why = f" ({keeping.share:.0%} of the tier are {kept.most})" if whole else ""
    return f"{kept.blocks}{whole} blocks kept for {duration_text(keeping.seconds)}{why}"
