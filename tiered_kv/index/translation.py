"""The one place where errors of LMDB and of its directory become ours."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import lmdb

from tiered_kv.errors import NoSpace, TieredKVError, TierError

__all__ = ["FOREIGN", "OutOfPages", "translated"]

FOREIGN = (lmdb.Error, struct.error)
"""What a transaction may raise that is not ours: LMDB's errors, and that of a row which has not the
length that we gave it, since the file was damaged."""


class OutOfPages(NoSpace):
    """LMDB found no free page, in its map or on the disk.

    What the last two transactions freed can't be used yet, nor what somebody reads: free more,
    commit twice, try again.

    Attributes:
        disk_full: whether it was on the disk.
    """

    def __init__(self, message: str, *, disk_full: bool = False) -> None:
        super().__init__(message)
        self.disk_full = disk_full


def translated(error: lmdb.Error | struct.error | OSError, tier: str, path: Path) -> TieredKVError:
    """What to raise from `error`, which a call on the environment in `path` gave."""
    if isinstance(error, struct.error):
        return TierError(
            f"tier {tier}: {path} is damaged: {error}; `tiered-kv verify --repair` may mend it",
            tier=tier,
        )
    code = error.code if isinstance(error, lmdb.Error) else error.errno
    if isinstance(error, lmdb.MapFullError):
        return OutOfPages(f"tier {tier}: the budget of {path} is used up")
    # LMDB reports a short write, which is what a full disk gives it, as EIO.
    full = code == errno.EIO and _free_bytes(path) < 2**20
    if full or code in (errno.ENOSPC, errno.EDQUOT):
        return OutOfPages(f"tier {tier}: the disk of {path} is full", disk_full=True)
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        what = f"{error}; make it writable for uid {os.geteuid()}, or set `access: read`"
    elif code == errno.ENOENT:
        what = f"{error}; is its disk mounted?"
    else:
        what = str(error)
    return TierError(f"tier {tier}: {path}: {what}", tier=tier)


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
