"""Directories that come into use again: what they hold is compared to the index."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from tiered_kv_nvme.space import Space
from tiered_kv_nvme.spreading import place_of

__all__ = ["look_after"]

logger = logging.getLogger(__name__)


def look_after(space: Space, tier: str, *, opening: bool = False) -> None:
    """Try directories again that failed, and compare those that came back to the index; not inside
    a transaction. `opening`: nobody has missed them yet.

    Raises:
        NoSpace: the index is full.
        TierError: no directory is in use, or the index does not work.
    """
    files = space.files
    files.stripes.try_again()
    with files.stripes.returned() as places:
        there = files.in_directories(places)
        if there:
            files.forget_in(there)
            lost = _lose_missing(space, there)
            if not opening:  # whoever took these blocks for lost finds them again
                with space.change() as change:
                    space.index.restart_log(change.txn)
            if lost:
                logger.warning("tier %s: %d blocks were lost with their files", tier, lost)
    if not files.stripes.here:
        raise files.stripes.nothing_left()


def _lose_missing(space: Space, there: Mapping[int, Collection[int]]) -> int:
    """Forget the segments that are not among the files found in their directories; how many blocks
    they held."""
    files = space.files
    missing = [
        number for number in space.numbers() if number not in there.get(place_of(number), (number,))
    ]
    away = files.away(missing)
    lost = 0
    for number in missing:
        if number in away:
            continue
        with space.change() as change:  # one each, so that others write in between
            # Another process may have made it since the files were listed.
            if not files.is_there(number):
                lost += change.lose(number)
    return lost
