"""The nvme tier's store: what the contract asks for, put together from its parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from tiered_kv.contracts import ChangeBatch, NewBlock, Place, ReadResult, StoreContext, StoreStat
from tiered_kv.errors import TieredKVError, TierError, reason_in
from tiered_kv.index import BlockIndex, Environment, Trust, WriteAccount, describe_namespace
from tiered_kv.values import PAGE_BYTES, BlockKey
from tiered_kv_nvme.budget import Budget
from tiered_kv_nvme.directory import sweep
from tiered_kv_nvme.engines import direct_mode, engine_for
from tiered_kv_nvme.headers import round_up
from tiered_kv_nvme.kvikio_io import KvikioFiles
from tiered_kv_nvme.plan import plan
from tiered_kv_nvme.presence import Presence
from tiered_kv_nvme.reading import Reader, Reading
from tiered_kv_nvme.rebuild import begin_empty, one_by_one, rebuild
from tiered_kv_nvme.records import Extent
from tiered_kv_nvme.room import RoomMaker
from tiered_kv_nvme.segments import SegmentFiles
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.space import Space
from tiered_kv_nvme.stripes import Stripes
from tiered_kv_nvme.writing import Spot, Writer

__all__ = ["NvmeStore"]

CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class NvmeStore:
    """A `BlockStore` in segment files; see the contract for the rules of every method."""

    def __init__(self, context: StoreContext) -> None:
        """Open, or make, the tier's directories.

        Raises:
            ConfigError: the capacity holds not even one block.
            IdentityError: one belongs to something else, or they are in another order than before.
            FormatError: one was written by a newer format.
            UnsupportedError: the index lies on a network file system, or KvikIO is asked for and
                cannot work here.
            TierError: the directory of the index, or none of them, can be used now.
            NoSpace: a disk leaves no room for the index, or for the marker of a new directory.
        """
        settings = context.settings
        if not isinstance(settings, NvmeSettings):
            raise ValueError(f"an nvme store takes NvmeSettings, not {type(settings).__name__}")
        self._settings: NvmeSettings = settings
        self._tier = context.tier
        sizes = [round_up(group.block_bytes, PAGE_BYTES) for group in context.geometry.groups]
        self.stripes = Stripes(settings, self._tier)
        """The tier's directories."""
        self._budget = Budget(
            settings, self.stripes, least_slot=min(sizes), largest_slot=max(sizes)
        )
        self.stripes.find()
        self._kvikio_files = KvikioFiles(writable=settings.writable)
        moves_blocks = context.writable or not settings.writable
        self._files = SegmentFiles(
            self.stripes,
            self._tier,
            writable=settings.writable,
            sync=settings.durability != "none",
            closing=self._kvikio_files.forget,
        )
        self._environment = Environment.open(
            self.stripes.index_path,
            kind="nvme",
            tier=self._tier,
            max_bytes=self._budget.index_bytes,
            writable=settings.writable,
            durability=settings.durability,
            on_empty=lambda reason: begin_empty(self._files, self._tier, reason),
            on_clean=self._files.flush_all if settings.durability == "none" else None,
        )
        self._lock = threading.Lock()
        self._closed = False
        self._space: Space | None = None
        self._writer: Writer | None = None
        self._presence: Presence | None = None
        try:
            with one_by_one(self._environment, self._tier):
                self.stripes.settle(self._environment)
                trust = Trust.after_open(self._environment)
                self._index = BlockIndex(
                    self._environment,
                    context.namespace,
                    context.geometry,
                    log_entries=self._budget.log_entries,
                    scoring=context.scoring,
                )
                if context.writable and settings.writable:
                    own = (context.namespace, context.geometry)
                    self._space = Space(
                        *(self._environment, self._index, self._files),
                        *(context.namespace.id, describe_namespace(*own)),
                    )
                    self._presence = Presence(self.stripes.index_path.parent)
                    rebuild(self._environment, self._space, self._tier, own)
            self._io = engine_for(
                settings, self.stripes, self._kvikio_files, moves_blocks=moves_blocks
            )
            self._direct_mode = direct_mode(settings) if moves_blocks else settings.gpu_direct
            self._account = WriteAccount(self._environment, self._tier, settings.write_budget)
            if self._space is not None:
                self._budget.measure(self._space.numbers)
                self._writer = Writer(
                    *(settings, self._space, self._files, self._io, self._budget, self._account),
                    context.geometry.rank,
                )
                self._writer.count_evicted(self._settle_in(self._space, self._writer))
            self._files.identity = self._environment.identity
            self._reader = Reader(
                self._tier, self._files, self._environment, self._index, trust, self._writer
            )
        except BaseException:
            self._let_go()
            raise
        logger.info(
            "tier %s: %s opened, %s",
            self._tier,
            ", ".join(str(path) for path in self.stripes.paths),
            self._modes(),
        )

    def _settle_in(self, space: Space, writer: Writer) -> int:
        """Give up what dead processes left, and what is beyond a capacity that was lowered; how
        many blocks."""
        with space.change() as change:
            change.recount()
            swept = sweep(self._files, {one.number for one in change.all_segments()})
            freed = change.reclaim()
            # Of directories that the tier has no more, where `paths` became shorter.
            for one in change.all_segments():
                if not self.stripes.knows(one.number):
                    change.lose(one.number)
        writer.look_after_directories(opening=True)
        if swept or freed:
            logger.info(
                "tier %s: %d files and %d slots that dead processes left are free again",
                self._tier,
                swept,
                freed,
            )
        evicted = 0
        beyond = True
        while beyond:
            with space.change() as change:
                maker = RoomMaker(space, change, self._budget, self._tier)
                beyond = maker.shrink()
            evicted += maker.evicted
        return evicted

    # --------------------------------------------------------------------------------- storing

    def reserve(self, blocks: Sequence[NewBlock]) -> list[Place | None]:
        """See `BlockStore.reserve`."""
        writer = self._for_writing("reserve room")
        return writer.reserve(blocks) if blocks else []

    def write(self, places: Sequence[Place], memory: Sequence[memoryview]) -> None:
        """See `BlockStore.write`.

        Raises:
            NoSpace: the disk is full after all (only where space could not be taken before).
            TierError: the disk failed, or a segment's file has vanished.
        """
        self._for_writing("write").write(places, memory)

    def publish(self, places: Sequence[Place]) -> None:
        """See `BlockStore.publish`. Places in a file that has vanished are given up.

        Raises:
            NoSpace: the index or the disk is full after all.
            TierError: the disk or the index failed.
        """
        writer = self._for_writing("publish")
        if places:
            writer.publish(places)

    def abandon(self, places: Sequence[Place]) -> None:
        """See `BlockStore.abandon`. A place that is being written is given back afterwards."""
        if self._writer is not None:
            self._writer.abandon(places)

    # --------------------------------------------------------------------------------- reading

    def read(self, keys: Sequence[BlockKey], memory: Sequence[memoryview]) -> list[ReadResult]:
        """See `BlockStore.read`. A block whose file has vanished or ends before it is MISSING,
        and its row is dropped."""
        if len(keys) != len(memory):
            raise ValueError(f"{len(keys)} keys, but {len(memory)} pieces of memory")
        with self.reading(keys, [view.nbytes for view in memory]) as batch:
            moves = plan(batch.pieces(memory), batch.fds, writing=False)
            failed = self._io.read_groups(moves.groups)
            moves.refuse_unaligned(failed)
            moves.unload()
            return batch.results(failed)

    # ------------------------------------------------------------------------ without host memory

    def raise_first(self, failed: Mapping[int, OSError], extents: Sequence[Extent]) -> None:
        """Raise what writing to the extent at a position in `failed` came to; see `writing`.

        Raises:
            NoSpace: a disk is full; or a directory failed, and there are others.
            TierError: the disk failed.
        """
        self._for_writing("write").raise_first(failed, extents)

    @property
    def settings(self) -> NvmeSettings:
        """The tier's settings."""
        return self._settings

    @property
    def kvikio_files(self) -> KvikioFiles:
        """KvikIO's handles of the descriptors that `reading` and `writing` give."""
        return self._kvikio_files

    def reading(
        self, keys: Sequence[BlockKey], room: Sequence[int]
    ) -> AbstractContextManager[Reading]:
        """Where these blocks lie, for handlers that read them by themselves; what `read` owes is
        in the answer of `Reading.results`. A block longer than its `room`, bytes, is MISSING."""
        self._check_open()
        return self._reader.reading(keys, room)

    def writing(self, places: Sequence[Place]) -> AbstractContextManager[list[Spot]]:
        """Where reserved places lie, for handlers that write them by themselves: whole pages, as
        many as the block's length takes. In place of `write`.

        Raises:
            TierError: on entering, a segment's file has vanished or cannot be opened.
        """
        return self._for_writing("write").writing(places)

    # ------------------------------------------------------------------------------ the others

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `BlockStore.contains`."""
        self._check_open()
        return self._reader.contains(keys)

    def discard(self, blocks: Sequence[NewBlock]) -> int:
        """See `BlockStore.discard`."""
        writer = self._for_writing("discard blocks")
        return writer.discard(blocks) if blocks else 0

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """See `BlockStore.delete`."""
        writer = self._for_writing("delete blocks")
        return writer.drop(keys) if keys else 0

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `BlockStore.touch`."""
        self._check_open()
        if self._settings.writable:
            self._index.touch(keys)

    def hottest(self) -> Iterator[BlockKey]:
        """See `RanksByUse.hottest`."""
        self._check_open()
        return iter(self._index.hottest())

    def arrange(self, keys: Sequence[BlockKey]) -> None:
        """See `RanksByUse.arrange`."""
        self._for_writing("order blocks")
        self._index.arrange(keys)

    def keep(self, keys: Sequence[BlockKey], seconds: float, most: int) -> int:
        """See `KeepsBlocks.keep`."""
        self._for_writing("keep blocks")
        return self._index.keep(keys, seconds, most)

    def kept(self) -> int:
        """See `KeepsBlocks.kept`."""
        self._check_open()
        return self._index.kept()

    def scan(self) -> Iterator[BlockKey]:
        """See `BlockStore.scan`."""
        self._check_open()
        return self._index.scan()

    def changes(self, cursor: int | None) -> ChangeBatch:
        """See `BlockStore.changes`."""
        self._check_open()
        return self._index.changes(cursor)

    def stat(self) -> StoreStat:
        """See `BlockStore.stat`."""
        self._check_open()
        self._environment.check_current()
        self._budget.measure(self._numbers)
        known = set(self._numbers())
        sizes = [size for number, size in self._files.numbers().items() if number in known]
        written = self._account.written()
        return StoreStat(
            blocks=self._index.count(),
            used_bytes=self._budget.used(sum(sizes)),
            capacity_bytes=self._settings.capacity,
            evicted_blocks=self._writer.evicted if self._writer else 0,
            modes=self._modes(),
            written_bytes=written.ever,
            written_today=written.today,
        )

    def _numbers(self) -> Collection[int]:
        """The segments that are the tier's."""
        return self._files.numbers() if self._space is None else self._space.numbers()

    def _modes(self) -> dict[str, str]:
        return {
            **self._io.modes(),
            **self.stripes.modes,
            "durability": self._settings.durability,
            "access": "read_write" if self._settings.writable else "read",
            "space": "sparse" if self._files.sparse else "preallocated",
            "gpu_direct": self._direct_mode,
        }

    def _check_open(self) -> None:
        self._environment.check_usable()
        if self._closed:
            raise TierError(f"tier {self._tier}: its store was closed", tier=self._tier)

    def _for_writing(self, what: str) -> Writer:
        self._check_open()
        if self._writer is None:
            raise ValueError(f"tier {self._tier} was opened for reading only, cannot {what}")
        return self._writer

    def close(self) -> None:
        """See `BlockStore.close`. Waits at most some seconds for I/O that still runs."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = self._io.close(CLOSE_SECONDS)
        try:
            # While a write hangs its places stay reserved, until this process has ended.
            hangs = not ended or (self._writer is not None and self._writer.is_writing)
            if self._space is not None and not hangs:
                self._space.leave()
            if self._settings.writable:
                self._index.flush()
        except TieredKVError as error:
            logger.warning(
                "tier %s: not closed cleanly: %s", self._tier, reason_in(self._tier, error)
            )
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._files.close()
        if self._presence is not None:
            self._presence.end()
        self._environment.close()
