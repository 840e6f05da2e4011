"""Makes a lost index again, from the header tables of the segments.

An entry tells all that its row said. Only entries of the segment's present epoch count, and of two
for one part of a block the younger one. No block is read: a slot that was being rewritten when the
index was lost has an old entry and new bytes, so the rows are marked (`Trust`), and `read`
says of them that their bytes are to be compared with the checksum whatever the settings say.

All of it is one transaction, the first one of the new index: a crash leads to its being done again.
It may take longer than anybody waits for a transaction: engines that open the tier at once do so
one after the other (`one_by_one`), so that the first one does it for all.
"""

from __future__ import annotations

import logging
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from tiered_kv.checksum import BlockChecksum
from tiered_kv.errors import NoSpace, TierError
from tiered_kv.index import (
    BlockIndex,
    Emptied,
    Environment,
    Row,
    Trust,
    directory_lock,
    understand_namespace,
)
from tiered_kv.values import PAGE_BYTES, BlockKey, CacheGeometry, Namespace
from tiered_kv_nvme.directory import wipe
from tiered_kv_nvme.faults import translated
from tiered_kv_nvme.headers import SegmentHeader, SlotEntry
from tiered_kv_nvme.presence import is_anyone_present
from tiered_kv_nvme.records import Extent, Segment
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.space import Change, Space
from tiered_kv_nvme.tables import read_entries

__all__ = ["begin_empty", "one_by_one", "rebuild"]

_WAIT_SECONDS = 120.0
"""Longest wait for another process that makes the index again: as for one that checks it."""
_PAIR = struct.Struct(">II")
_BATCH_BLOCKS = 4_096
_KEPT_SHARE = 0.9
"""Of what filled the index, this share is tried next."""

logger = logging.getLogger(__name__)


class _Find(NamedTuple):
    """A part of a block. Some hundred bytes each, for as long as the rebuild takes."""

    generation: int
    number: int
    slot: int
    rank: int
    key: BlockKey
    checksum: BlockChecksum


@dataclass(frozen=True, slots=True)
class _Sound:
    """A segment file whose header can be believed."""

    header: SegmentHeader
    namespace: Namespace
    geometry: CacheGeometry
    file_bytes: int
    used: int
    """When the file was changed last, nanoseconds since the epoch."""


class _Full(Exception):
    """The index has no room for more than so many of the parts."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


def begin_empty(files: SegmentFiles, tier: str, reason: Emptied) -> None:
    """The index of a tier starts empty: keep the segments only where it can be made
    again from them.

    Raises:
        FormatError: a segment was written by another format version.
        TierError: one cannot be read or deleted; or a process goes on with the index that was
            here, so that the segments are not ours to use.
    """
    directory = files.directory
    with translated("look at", directory, tier):
        present = is_anyone_present(directory)
    if present:
        raise TierError(
            f"tier {tier}: the index in {directory} was deleted while other processes use "
            "it; stop them, then start again: what they stored comes back",
            tier=tier,
        )
    if reason is Emptied.CRASHED:
        wipe(files)


@contextmanager
def one_by_one(environment: Environment, tier: str) -> Iterator[None]:
    """While no other process is in here, or opens or closes the index. Nothing where it is only
    read.

    Raises:
        TierError: another process kept it for too long, or the directory cannot be opened.
    """
    if not environment.writable:
        yield
        return
    with ExitStack() as held:
        with translated("lock", environment.path, tier):
            held.enter_context(directory_lock(environment.path, tier, _WAIT_SECONDS))
        yield


def rebuild(
    environment: Environment,
    space: Space,
    tier: str,
    own: tuple[Namespace, CacheGeometry] | None = None,
) -> int | None:
    """If the index is new and segments of ours are there, fill it from them; how many blocks' parts
    came back. None where there was nothing to do.

    Takes about 20 us per part, and reads half a KiB of each. `own` is a namespace that is known
    besides those that the headers describe. Files whose headers are damaged, or whose namespace
    nobody describes, stay out: they are swept afterwards.

    Raises:
        FormatError: a segment was written by another format version.
        NoSpace: the disk leaves no room for the index.
        TierError: a file cannot be used.
    """
    with environment.read() as txn:
        if not space.totals.is_new(txn):
            return None
    sound, unknown = _survey(space, own)
    if not sound:
        return None
    if not space.files.stripes.whole:
        # What lies in the directory that is missing would be taken for leftovers when it is back.
        raise TierError(
            f"tier {tier}: the index was lost, and not all directories are there that it is to be "
            f"made again from ({space.files.stripes.modes['paths']}); bring them back, or give the "
            "tier an empty one for each that is gone for good",
            tier=tier,
        )
    finds, newest = _finds(space, sound)
    indexes = _indexes(environment, sound, finds)
    marks = Trust(environment)
    count = len(finds)
    while True:
        try:
            with space.change() as change:
                if not space.totals.is_new(change.txn):
                    return None
                segments = _record(change, space, sound, indexes)
                _publish(change, space, indexes, segments, finds[:count])
                marks.finish(change.txn, newest)
            break
        except _Full as full:
            count = int(full.count * _KEPT_SHARE)
        except NoSpace:
            if not count:
                raise
            count //= 2
    logger.warning(
        "tier %s: the index was lost; it was made again from %d segments: %d blocks' parts of %d "
        "namespaces came back, %d had no room; %d segments of unknown namespaces are free",
        *(tier, len(sound), count, len({one.header.namespace_id for one in sound.values()})),
        *(len(finds) - count, unknown),
    )
    return count


def _survey(
    space: Space, own: tuple[Namespace, CacheGeometry] | None
) -> tuple[dict[int, _Sound], int]:
    """The segments that can be used, by number; and of how many nobody knows the namespace."""
    known = {} if own is None else {own[0].id: own}
    headers: dict[int, tuple[SegmentHeader, int]] = {}
    for number, size in space.files.numbers().items():
        header = space.files.header(number)
        if header is None or header.number != number or not _usable(header, size):
            continue
        headers[number] = header, size
        described = understand_namespace(header.description) if header.description else None
        if described is not None and described[0].id == header.namespace_id:
            known.setdefault(header.namespace_id, described)
    sound = {
        number: _Sound(header, *known[header.namespace_id], size, space.files.changed_at(number))
        for number, (header, size) in headers.items()
        if header.namespace_id in known
    }
    return sound, len(headers) - len(sound)


def _usable(header: SegmentHeader, size: int) -> bool:
    layout = header.layout
    return (
        layout.slots > 0
        and layout.slot_bytes > 0
        and layout.slot_bytes % PAGE_BYTES == 0
        and layout.stride >= SlotEntry.PACKED_BYTES
        and layout.file_bytes <= size
    )


def _belongs(entry: SlotEntry, segment: _Sound) -> bool:
    """Whether it is no leftover of an earlier life of the file, and makes sense."""
    return (
        entry.epoch == segment.header.epoch
        and entry.rank < segment.geometry.world_size
        and len(entry.key) > 0
        and 0 < entry.checksum.length <= segment.header.layout.slot_bytes
    )


def _finds(space: Space, sound: Mapping[int, _Sound]) -> tuple[list[_Find], int]:
    """The parts, youngest first, each once; and the greatest number that must not be given out
    again."""
    finds: list[_Find] = []
    newest = 0
    for number, one in sound.items():
        newest = max(newest, one.header.epoch)
        with space.files.lease([number]) as leased:
            try:
                found = [
                    _Find(entry.generation, number, slot, entry.rank, entry.key, entry.checksum)
                    for slot, entry in read_entries(leased.fds[number], one.header.layout)
                    if _belongs(entry, one)
                ]
            except (OSError, KeyError) as error:
                reason = leased.failed.get(number, error)
                logger.warning("%s: its blocks are lost: %s", space.files.path(number), reason)
                continue
        finds.extend(found)
    finds.sort(key=attrgetter("generation"), reverse=True)
    if finds:
        newest = max(newest, finds[0].generation)
    seen: set[tuple[bytes, int, BlockKey]] = set()
    youngest: list[_Find] = []
    for find in finds:
        name = (sound[find.number].header.namespace_id, find.rank, find.key)
        if name not in seen:
            seen.add(name)
            youngest.append(find)
    return youngest, newest


_Indexes = dict[tuple[bytes, int], BlockIndex]


def _indexes(
    environment: Environment, sound: Mapping[int, _Sound], finds: Iterable[_Find]
) -> _Indexes:
    """By namespace id and rank; they record the namespaces."""
    shapes = {one.header.namespace_id: one for one in sound.values()}
    wanted = {(sound[find.number].header.namespace_id, find.rank) for find in finds}
    wanted.update((namespace_id, 0) for namespace_id in shapes)
    return {
        (namespace_id, rank): BlockIndex(
            environment,
            shapes[namespace_id].namespace,
            replace(shapes[namespace_id].geometry, rank=rank),
        )
        for namespace_id, rank in wanted
    }


def _record(
    change: Change, space: Space, sound: Mapping[int, _Sound], indexes: _Indexes
) -> dict[int, Segment]:
    """Note the segments, all of them empty; their headers name the new index."""
    segments: dict[int, Segment] = {}
    for number, one in sound.items():
        index = indexes[one.header.namespace_id, 0]
        slot_class = index.slot_class(change.txn, 0, one.header.layout.slot_bytes)
        header = replace(one.header, identity=space.identity, slot_class=slot_class)
        if header != one.header:
            space.files.write_header(header)
        segments[number] = change.record(header, one.file_bytes, one.used)
    space.totals.number_after(change.txn, sound)
    return segments


def _publish(
    change: Change,
    space: Space,
    indexes: _Indexes,
    segments: Mapping[int, Segment],
    finds: Sequence[_Find],
) -> None:
    """Rows for all of them, the oldest first, so that it is evicted first.

    Raises:
        _Full: the index is.
    """
    for end in range(len(finds), 0, -_BATCH_BLOCKS):
        batch = finds[max(0, end - _BATCH_BLOCKS) : end]
        groups: dict[tuple[bytes, int], list[_Find]] = defaultdict(list)
        for find in batch:
            groups[segments[find.number].namespace_id, find.rank].append(find)
        for name, group in groups.items():
            index = indexes[name]
            rows = [(find.key, _row(find, segments[find.number])) for find in group]
            for find in group:
                segments[find.number].taken[find.slot] = 1
                change.changed(segments[find.number])
            keys = index.full_keys(find.key for find in group)
            slots = [
                (_PAIR.pack(find.number, find.slot), key)
                for find, key in zip(group, keys, strict=True)
            ]
            with change.txn.cursor(space.slots) as cursor:
                cursor.putmulti(sorted(slots))
            change.free(index.publish(change.txn, rows))
        if space.index_is_full(change.txn):
            raise _Full(len(finds) - end + len(batch))


def _row(find: _Find, segment: Segment) -> Row:
    extent = Extent(
        *(find.number, segment.epoch, find.slot, segment.layout.offset(find.slot)),
        *(segment.slot_class, find.generation),
    )
    return Row(find.checksum, segment.slot_class, extent.location(), find.generation)
