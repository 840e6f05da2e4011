"""Deletes what a store holds of its namespace, in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice

from tiered_kv.contracts import BlockStore
from tiered_kv.errors import TieredKVError

__all__ = ["erase"]

logger = logging.getLogger(__name__)

ERASED_AT_ONCE = 1024
"""Blocks of one call: a store's transaction holds up writers."""


def erase(store: BlockStore, tier: str, stop: Callable[[], bool]) -> int:
    """Delete the blocks that a scan of the store finds; how many were there.

    What others store meanwhile may stay. Blocks on the tier's medium, and ends early where `stop`
    says so. An error of the tier ends it, and is logged: what is left gives way to eviction.
    """
    erased = 0
    try:
        keys = store.scan()
        while not stop() and (batch := list(islice(keys, ERASED_AT_ONCE))):
            erased += store.delete(batch)
    except (TieredKVError, ValueError) as error:
        logger.warning(
            "tier %s: not all blocks from before the reset could be erased (%d were): %s",
            tier,
            erased,
            error,
        )
    else:
        logger.info("tier %s: %d blocks from before the reset were erased", tier, erased)
    return erased
