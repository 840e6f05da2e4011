"""The directories that a tier is spread over: whose they are, and which of them are in use.

Each directory carries a marker that says which tier's it is, and the how manieth of that tier; the
index knows each one's name. So a directory that is not mounted is told from one that was emptied,
and a directory of another tier, or in another's place, is refused. A segment's number says in which
directory it lies.

A directory that fails is out of use, with what it holds, until it works again: it is tried every
`RETRY_SECONDS`. One that can only be read is read. The one that holds the index is needed.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered_kv.errors import (
    FormatError,
    IdentityError,
    NoSpace,
    TieredKVError,
    TierError,
    reason_in,
)
from tiered_kv.index import Environment, Transaction
from tiered_kv_nvme.directory import INDEX, Marker, Seen, look, make, probe, write_marker
from tiered_kv_nvme.faults import READ_ONLY, translated
from tiered_kv_nvme.members import Directory, Known
from tiered_kv_nvme.posix import DirectMode
from tiered_kv_nvme.settings import NvmeSettings
from tiered_kv_nvme.spreading import place_of

__all__ = ["RETRY_SECONDS", "Stripes"]

RETRY_SECONDS = 5.0
"""How long a directory that failed is left alone, and one that was full gets no new segment."""

_PLACE = struct.Struct(">I")
_TIER_KEY = b"tier"
_INDEX_PLACE = 65_535
"""In the marker of a directory that holds the index and nothing else."""
_UNKNOWN_DEVICE = 0
"""Of a directory that was missing when the index was made again."""
_MADE_WITH = "give the tier the directories that it was made with, or empty ones"

logger = logging.getLogger(__name__)


class Stripes:
    """The tier's directories. Thread-safe; every call may ask the disks."""

    def __init__(self, settings: NvmeSettings, tier: str) -> None:
        """Ask no disk yet. `find` and `settle` must follow."""
        self._tier = tier
        self._writable = settings.writable
        home = settings.index_home
        self.index_path = home / INDEX
        """Where the index lies."""
        self._lock = threading.Lock()
        self._environment: Environment | None = None
        self._home_device = 0
        self._index_file = 0, 0
        self._home = Seen(False, 0, None)
        self._lost_index = False
        """Whether the tier was there before its index: what is missing may hold blocks."""
        self._returned: set[int] = set()
        self._directories = [
            Directory(place, path, path == home) for place, path in enumerate(settings.folders)
        ]

    def find(self) -> None:
        """Look at all of them; make the one of the index where it is missing.

        Raises:
            IdentityError: one holds other things than a tier's, is another tier's, or is in another
                place than before.
            FormatError: one was written by a newer format.
            TierError: the directory of the index cannot be used.
        """
        home, tier = self.index_path.parent, self._tier
        with translated("use", home, tier):
            self._home = look(home, tier)
            if not self._home.exists:
                make(home, tier, allowed=self._writable)
        probe(home, tier, writable=self._writable)
        for one in self._directories:
            try:
                with translated("use", one.path, tier):
                    one.seen = look(one.path, tier)
            except TierError as error:
                if one.holds_index:
                    raise
                one.trouble = str(error)
        self._refuse_strangers()
        for one in self._directories:
            # Should the index turn out to be lost, what is surely ours is swept before `settle`.
            marked = one.seen is not None and one.seen.marker is not None
            if one.holds_index or (marked and self._home.marker is not None):
                one.trouble = None

    def _refuse_strangers(self) -> None:
        """Raise IdentityError where the markers do not agree with each other or with the order."""
        first = self._home.marker
        for one in self._directories:
            marker = None if one.seen is None else one.seen.marker
            if marker is None:
                continue
            first = first or marker
            if marker.tier != first.tier:
                raise IdentityError(
                    f"tier {self._tier}: {one.path} belongs to another tier than the directories "
                    f"before it; {_MADE_WITH}"
                )
            if marker.place != one.place:
                raise IdentityError(
                    f"tier {self._tier}: {one.path} was {_nth(marker.place)} of its tier, but is "
                    f"given as {_nth(one.place)}; expected the same order as before"
                )

    # -------------------------------------------------------------------------------- opening

    def settle(self, environment: Environment) -> None:
        """Compare the directories with what the index knows of them, and take new ones in. Not
        inside a transaction.

        Raises:
            IdentityError: one belongs to another tier.
            NoSpace: a new one has no room for its marker.
            TierError: none can be used; or the index does not work.
        """
        self._environment = environment
        with translated("use", self.index_path, self._tier):
            found = self.index_path.stat()
            self._home_device = found.st_dev
            self._index_file = found.st_dev, found.st_ino
        database = environment.database("directories")
        if environment.writable:
            with environment.write() as txn:
                names = txn.cursor(db=database).iternext(keys=True, values=False)
                self._lost_index = self._home.marker is not None and set(names) <= {_TIER_KEY}
                self._settle_index(txn)
                for one in self._directories:
                    self._take_in(one, txn)
                for key in list(txn.cursor(db=database).iternext(keys=True, values=False)):
                    if key != _TIER_KEY and _PLACE.unpack(key)[0] >= len(self._directories):
                        txn.delete(key, db=database)
        else:
            with environment.read() as txn:
                for one in self._directories:
                    self._take_in(one, txn)
        self._returned.update(self.here)
        if not self.here:
            raise self.nothing_left()

    def _settle_index(self, txn: Transaction) -> None:
        """Let the index and its directory say which tier this is."""
        database = self._settled().database("directories")
        tier = txn.get(_TIER_KEY, db=database)
        marker = self._home.marker
        if (
            tier is None
            and marker is None
            and any(
                one.seen is not None and one.seen.marker is not None for one in self._directories
            )
        ):
            raise IdentityError(
                f"tier {self._tier}: there are directories of a tier in `paths`, but its index is "
                f"not in {self.index_path}; {_MADE_WITH}"
            )
        tier = tier or (marker.tier if marker else secrets.token_bytes(16))
        txn.put(_TIER_KEY, tier, db=database)
        home = self.index_path.parent
        if home not in self.paths and marker != Marker(tier, _INDEX_PLACE):
            with translated("make", home, self._tier):
                write_marker(home, Marker(tier, _INDEX_PLACE))

    def _take_in(self, one: Directory, txn: Transaction) -> None:
        """Use the directory if it is the one that is meant; else note why not."""
        try:
            with translated("use", one.path, self._tier):
                one.seen = look(one.path, self._tier)
            self._identify(one, one.seen, txn)
            mode, read_only = self._try(one.path)
        except TierError as error:
            if one.holds_index:
                raise
            self._put_out(one, str(error))
            return
        with self._lock:
            if one.trouble is not None or (one.read_only is not None and read_only is None):
                self._returned.add(one.place)
            one.mode, one.read_only, one.trouble = mode, read_only, None

    def _try(self, path: Path) -> tuple[DirectMode, str | None]:
        """How files are opened there, and why nothing can be stored there if so.

        Raises:
            TierError: it does not work.
        """
        if not self._writable:
            return probe(path, self._tier, writable=False), None
        try:
            return probe(path, self._tier, writable=True), None
        except TierError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in READ_ONLY:
                raise
            return probe(path, self._tier, writable=False), str(error)

    def _identify(self, one: Directory, seen: Seen, txn: Transaction) -> None:
        """Find out whether the directory is the one that the index knows, and give it a marker
        where it has none and may have it.

        Raises:
            IdentityError: it belongs to another tier.
            NoSpace: there is no room for its marker.
            TierError: it is not what the index knows, or cannot be made.
        """
        database = self._settled().database("directories")
        key = _PLACE.pack(one.place)
        data = txn.get(key, db=database)
        known = None if data is None else Known.unpack(data)
        tier = txn.get(_TIER_KEY, b"", db=database)
        marker = seen.marker
        if marker is None:
            if known is None and self._lost_index and not seen.exists and self._writable:
                known = Known(_UNKNOWN_DEVICE, str(one.path))
                txn.put(key, known.pack(), db=database)
            same = known is not None and one.path == Path(known.path) and not one.holds_index
            if same and not seen.exists:
                raise TierError(
                    f"tier {self._tier}: {one.path} is not there; mount its disk, or make an empty "
                    "directory of that name where it is gone for good",
                    tier=self._tier,
                )
            if same and known is not None and known.device not in (_UNKNOWN_DEVICE, seen.device):
                raise TierError(
                    f"tier {self._tier}: {one.path} is empty and on another file system than "
                    "before; mount its disk, or give the tier another directory where it was "
                    "replaced",
                    tier=self._tier,
                )
            marker = Marker(tier, one.place)
            if self._writable:
                with translated("make", one.path, self._tier):
                    make(one.path, self._tier, allowed=True)
                    write_marker(one.path, marker)
        if marker != Marker(tier, one.place):
            raise IdentityError(
                f"tier {self._tier}: {one.path} belongs to another tier than the index in "
                f"{self.index_path}; {_MADE_WITH}"
            )
        one.marker = marker if self._writable else seen.marker
        if self._writable:
            with translated("use", one.path, self._tier):
                now = Known(one.path.stat().st_dev, str(one.path))
            if known != now:
                txn.put(key, now.pack(), db=database)

    def _settled(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("settle was not called")
        return self._environment

    # ------------------------------------------------------------------------------ how they are

    def path(self, number: int) -> Path:
        """Where a segment lies, or would."""
        return self._directories[place_of(number)].path / f"segment-{number:06d}"

    @property
    def paths(self) -> tuple[Path, ...]:
        """All directories, in use or not."""
        return tuple(one.path for one in self._directories)

    @property
    def here(self) -> list[int]:
        """Places of the directories that are in use."""
        return [one.place for one in self._directories if one.trouble is None]

    @property
    def storing(self) -> list[int]:
        """Places of the directories in which blocks may be stored."""
        return [one.place for one in self._directories if self.stores_in(one.place)]

    def stores_in(self, place: int) -> bool:
        """Whether blocks may be stored in a directory."""
        one = self._directories[place]
        return one.trouble is None and one.read_only is None

    @property
    def whole(self) -> bool:
        """Whether all directories are in use."""
        return all(one.trouble is None for one in self._directories)

    def knows(self, number: int) -> bool:
        """Whether the segment's directory is one of the tier's, in use or not."""
        return place_of(number) < len(self._directories)

    def has(self, number: int) -> bool:
        """Whether the segment's directory is in use."""
        return self.knows(number) and self._directories[place_of(number)].trouble is None

    def takes(self, number: int) -> bool:
        """Whether blocks may be stored in the segment."""
        return self.has(number) and self._directories[place_of(number)].read_only is None

    def mode(self, number: int) -> DirectMode:
        """How the segment's file is to be opened."""
        return self.mode_of(place_of(number))

    def mode_of(self, place: int) -> DirectMode:
        """How files of a directory are to be opened."""
        return self._directories[place].mode

    @property
    def alignment(self) -> int:
        """What suits all directories, as in `DirectMode`."""
        return max(one.mode.alignment for one in self._directories)

    @property
    def modes(self) -> dict[str, str]:
        """What is in effect."""
        used = [one for one in self._directories if one.trouble is None]
        modes = {str(one.mode): one.path for one in used}
        found = {"io": "; ".join(modes)}
        if len(modes) > 1:
            found["io"] = "; ".join(f"{path}: {mode}" for mode, path in modes.items())
        count = len(self._directories)
        troubles = [
            f"{one.path} {'is read only' if one.trouble is None else 'failed'}: {trouble}"
            for one in self._directories
            if (trouble := one.trouble or one.read_only) is not None
        ]
        if count > 1 or troubles:
            many = f"{len(used)} of {count} in use" if troubles else f"{count} in use"
            found["paths"] = "; ".join([many, *troubles])
        return found

    def nothing_left(self) -> TierError:
        """The error to raise where no directory is in use."""
        why = (one.trouble or one.read_only or "" for one in self._directories)
        return TierError("; ".join(reason for reason in why if reason), tier=self._tier)

    def is_beside_index(self, number: int) -> bool:
        """Whether the segment takes room from the index's file system."""
        try:
            return self.has(number) and self.path(number).stat().st_dev == self._home_device
        except OSError:
            return False

    # ---------------------------------------------------------------------------------- trouble

    def failed(self, place: int) -> bool:
        """Something went wrong in a directory: look whether it is it; whether it is out of use
        now. May be called inside a transaction."""
        one = self._directories[place]
        trouble: str | None = None
        read_only: str | None = None
        try:
            with translated("use", one.path, self._tier):
                seen = look(one.path, self._tier)
            if seen.marker != one.marker or not self._index_is_in(one):
                there = "it is not what it was" if seen.exists else "it is not there any more"
                trouble = f"tier {self._tier}: {one.path} cannot be used: {there}"
            else:
                _, read_only = self._try(one.path)
        except NoSpace:
            pass
        except (TierError, IdentityError, FormatError) as error:
            trouble = str(error)
        if trouble is not None:
            self._put_out(one, trouble)
        elif read_only != one.read_only:
            logger.warning("no further blocks are stored there: %s", read_only)
            with self._lock:
                one.read_only = read_only
                one.retry_at = time.monotonic() + RETRY_SECONDS
        return trouble is not None

    def _index_is_in(self, one: Directory) -> bool:
        if not one.holds_index:
            return True
        try:
            found = self.index_path.stat()
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._index_file

    def _put_out(self, one: Directory, trouble: str) -> None:
        with self._lock:
            news = one.trouble != trouble
            one.trouble = trouble
            one.retry_at = time.monotonic() + RETRY_SECONDS
        if news:
            logger.warning(
                "tier %s: a directory is out of use, with what it holds: %s",
                self._tier,
                reason_in(self._tier, trouble),
            )

    def try_again(self) -> None:
        """Take directories in again that work again; those whose time has come are looked at. Not
        inside a transaction."""
        if all(one.trouble is None and one.read_only is None for one in self._directories):
            return
        now = time.monotonic()
        with self._lock:
            due = [
                one
                for one in self._directories
                if (one.trouble or one.read_only) and one.retry_at <= now and not one.examined
            ]
            for one in due:
                one.examined = True
        for one in due:
            try:
                self._try_again(one)
            finally:
                one.examined = False

    def _try_again(self, one: Directory) -> None:
        before = one.trouble or one.read_only
        environment = self._settled()
        try:
            if not self._index_is_in(one):
                raise TierError(
                    f"tier {self._tier}: the index that was opened is not in {self.index_path} any "
                    "more; put it back, or restart the engine",
                    tier=self._tier,
                )
            with translated("use", one.path, self._tier):
                seen = look(one.path, self._tier)
            if seen.marker is not None and seen.marker == one.marker:
                # A disk takes long to fail: not in the transaction that all others wait for.
                self._try(one.path)
            with environment.write() if environment.writable else environment.read() as txn:
                self._take_in(one, txn)
        except (OSError, TieredKVError) as error:
            self._put_out(one, str(error))
        if (one.trouble or one.read_only) is None:
            logger.warning(
                "tier %s: %s works again; it had failed: %s",
                self._tier,
                one.path,
                reason_in(self._tier, before),
            )
        else:
            one.retry_at = time.monotonic() + RETRY_SECONDS

    @contextmanager
    def returned(self) -> Iterator[set[int]]:
        """Places of directories that came into use since the last time: what the index says of them
        may not hold. They are given again where the block ends with an error."""
        with self._lock:
            returned, self._returned = self._returned, set()
        try:
            yield returned
        except BaseException:
            with self._lock:
                self._returned |= returned
            raise

    # ------------------------------------------------------------------------------------- room

    def full(self, place: int) -> None:
        """A file could not be made for want of room: none is made there for a while."""
        with self._lock:
            self._directories[place].full_until = time.monotonic() + RETRY_SECONDS

    def emptier(self, place: int) -> None:
        """A file was deleted there."""
        with self._lock:
            self._directories[place].full_until = 0.0

    def is_full(self, place: int) -> bool:
        """Whether `full` was said of it lately."""
        return time.monotonic() < self._directories[place].full_until


def _nth(place: int) -> str:
    return "the directory of the index" if place == _INDEX_PLACE else f"directory {place + 1}"
