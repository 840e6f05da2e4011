"""The directory of an environment: whose it is, who uses it, whether its data can be trusted.

Beside LMDB's own `data.mdb` and `lock.mdb` it holds `tiered-kv.json`, which says whose it is and
how it was left, and `users.lock`, on which every process that has it open for writing keeps a
shared lock; `turn.lock` is locked while one of them writes. Opening and closing happen under an
exclusive lock on the directory itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb

from tiered_kv.errors import FormatError, IdentityError, TierError, UnsupportedError
from tiered_kv.index.owners import boot_id
from tiered_kv.values import FORMAT_VERSION

__all__ = [
    "DATA",
    "LOCK",
    "MARKER",
    "TURN",
    "USERS",
    "Marker",
    "bytes_beside_data",
    "data_bytes",
    "directory_lock",
    "fit_data",
    "make_private",
    "number_of",
    "read_marker",
    "refuse_empty_mount_point",
    "refuse_network_file_system",
    "remove_data",
    "set_aside",
    "start_marker",
    "try_lock",
    "unlock",
    "write_marker",
]

DATA = "data.mdb"
LOCK = "lock.mdb"
MARKER = "tiered-kv.json"
USERS = "users.lock"
TURN = "turn.lock"

_DAMAGED = "data.mdb.damaged-"
_NEVER_FOREIGN = {USERS, TURN, f"{MARKER}.new", "lost+found"}
_LOCK_POLL_SECONDS = 0.01

_NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x517B: "SMB",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x00C36400: "CephFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x5346414F: "AFS",
}


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of `tiered-kv.json`."""

    kind: str
    """Which store the directory belongs to."""
    boot_id: str
    """Boot of the machine under which it was opened last (hex)."""
    clean: bool
    """Whether everything was flushed and nobody has it open."""
    durability: str
    """What the last writer promised."""
    data_bytes: int = 0
    """Size of `data.mdb` at the clean close."""
    data_mtime_ns: int = 0
    """Time of its last change then: a difference tells that somebody else changed it."""
    format: int = FORMAT_VERSION


def start_marker(kind: str, durability: str) -> Marker:
    """The marker of a directory that this process is about to write to."""
    return Marker(kind, boot_id().hex(), clean=False, durability=durability)


def number_of(path: Path) -> tuple[int, int]:
    """Device and inode of a file or directory.

    Raises:
        OSError: it is not there.
    """
    status = path.stat()
    return status.st_dev, status.st_ino


def make_private(path: Path) -> None:
    """Make `path` and its missing parents, readable by their owner alone.

    Raises:
        OSError: as `mkdir` does.
    """
    if not path.is_dir():
        make_private(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)


def refuse_empty_mount_point(path: Path, tier: str, device: int | None) -> None:
    """Raise `TierError` where nothing lies at `path`, which this process had open on another file
    system, `device`: its disk was unmounted, and what lies below must not fill up in its place.

    Raises:
        OSError: as the file system says.
    """
    if device is None or (path / DATA).exists():
        return
    nearest = path
    while not nearest.exists():
        nearest = nearest.parent
    if nearest.stat().st_dev != device:
        raise TierError(
            f"tier {tier}: {path} is empty and on another file system than before; mount its "
            "disk, or restart the engine where it was replaced",
            tier=tier,
        )


def refuse_network_file_system(path: Path) -> None:
    """LMDB maps its file and locks it with futexes: neither works between machines.

    Raises:
        UnsupportedError: `path` lies on a network or user-space file system.
    """
    name = _NETWORK_FILE_SYSTEMS.get(file_system_magic(path))
    if name is not None:
        raise UnsupportedError(
            f"{path} is on {name}, where LMDB can corrupt its data; put the tier on a local disk, "
            "or set `force: true` if only one machine uses the directory and mmap works there"
        )


def file_system_magic(path: Path) -> int:
    """`f_type` of statfs(2): the kind of file system."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = ctypes.create_string_buffer(512)
    if libc.statfs(os.fsencode(path), result) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return ctypes.c_ulong.from_buffer(result).value & 0xFFFFFFFF


@contextmanager
def directory_lock(path: Path, tier: str, timeout: float) -> Iterator[None]:
    """Hold the exclusive lock under which the directory is opened and closed.

    Raises:
        TierError: another process kept it for `timeout` seconds.
        OSError: the directory cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + timeout
        while not try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise TierError(
                    f"tier {tier}: another process has been opening or closing {path} for "
                    f"{timeout:.0f} s; see who holds a lock on it with lslocks",
                    tier=tier,
                )
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        unlock(fd)


def try_lock(fd: int, mode: int) -> bool:
    """Take or change a lock without waiting; whether it was had."""
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give up a lock and close its file, of which a process that was forked meanwhile may hold a
    copy: closing alone would leave the lock with that."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def read_marker(path: Path, kind: str) -> Marker | None:
    """The marker, or None where the directory is new and empty.

    Raises:
        IdentityError: the directory belongs to something else.
        FormatError: it was written by a newer format.
    """
    file = path / MARKER
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        foreign = sorted({entry.name for entry in path.iterdir()} - _NEVER_FOREIGN)
        if foreign:
            raise IdentityError(
                f"{path} holds other files ({', '.join(foreign[:3])}{', ...' * (len(foreign) > 3)})"
                f" and no {MARKER}: it is not a tier's directory; give the tier an empty one"
            ) from None
        return None
    except UnicodeDecodeError as error:
        raise _unreadable(file, str(error)) from error
    try:
        fields = json.loads(text)
        version = fields["format"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise FormatError(
                f"{path} was written in format {version}; this version of tiered-kv reads up to "
                f"{FORMAT_VERSION}: update tiered-kv, or give the tier an empty directory"
            )
        if isinstance(version, int) and version < FORMAT_VERSION:
            raise FormatError(
                f"{path} was written in format {version}; this version of tiered-kv reads format "
                f"{FORMAT_VERSION} only: empty the directory, whose blocks are then stored anew"
            )
        marker = Marker(**{name: fields[name] for name in Marker.__dataclass_fields__})
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, str(error)) from error
    if marker.kind != kind:
        raise IdentityError(
            f"{path} belongs to a tier of type {marker.kind!r}, not {kind!r}; "
            "give each tier a directory of its own"
        )
    return marker


def _unreadable(file: Path, reason: str) -> IdentityError:
    return IdentityError(
        f"{file} cannot be read ({reason}); it says whose directory this is. "
        "Empty the directory if a tier's cached blocks are all it holds, else name another"
    )


def write_marker(path: Path, marker: Marker) -> None:
    """Replace the marker; it is on the disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    new = path / f"{MARKER}.new"
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(asdict(marker), file, indent=1)
        file.flush()
        os.fsync(fd)
    new.replace(path / MARKER)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_data(path: Path) -> None:
    """Remove `data.mdb`, and `lock.mdb`, whose reader table belongs to it."""
    for name in (DATA, LOCK):
        (path / name).unlink(missing_ok=True)


def fit_data(path: Path, most_bytes: int) -> bool:
    """Whether what `data.mdb` holds fits into so many bytes; a file that is longer than what it
    holds, since its room was taken ahead, is cut. Nobody may have it open; it was checked.

    Raises:
        OSError: it cannot be used.
        lmdb.Error: LMDB cannot open it.
    """
    data = path / DATA
    if data.stat().st_size <= most_bytes:
        return True
    with lmdb.Environment(str(data), subdir=False, readonly=True, lock=False, lib_version=0) as env:
        held = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if held > most_bytes:
        return False
    os.truncate(data, most_bytes)
    return True


def set_aside(path: Path, keep_bytes: int) -> Path | None:
    """Rename a damaged `data.mdb`, or remove it when it is larger than `keep_bytes`, so that the
    budget still holds; older ones are removed. Gives its new name; None when it is removed."""
    earlier = [file for file in path.iterdir() if file.name.startswith(_DAMAGED)]
    numbers = [int(file.name.removeprefix(_DAMAGED)) for file in earlier if _numbered(file)]
    for file in earlier:
        file.unlink(missing_ok=True)
    if (path / DATA).stat().st_size > keep_bytes:
        remove_data(path)
        return None
    (path / LOCK).unlink(missing_ok=True)
    return (path / DATA).rename(path / f"{_DAMAGED}{max(numbers, default=0) + 1}")


def _numbered(file: Path) -> bool:
    return file.name.removeprefix(_DAMAGED).isdecimal()


def bytes_beside_data(path: Path, own_budget: Collection[str] = ()) -> int:
    """Bytes on the disk of all other files of the directory and below it, without the
    subdirectories that have a budget of their own."""
    total = 0
    for folder, folders, names in os.walk(path):
        if folder == str(path):
            folders[:] = [name for name in folders if name not in own_budget]
            names = [name for name in names if name != DATA]  # noqa: PLW2901
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(Path(folder, name)).st_blocks * 512
    return total


def data_bytes(path: Path) -> int:
    """Bytes on the disk of `data.mdb`.

    Raises:
        OSError: it is gone.
    """
    return (path / DATA).stat().st_blocks * 512
