"""The one place where this backend translates errors of the operating system and of KvikIO."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered_kv.errors import NoSpace, TierError
from tiered_kv_nvme.groups import EndOfFile

__all__ = ["OUT_OF_SPACE", "READ_ONLY", "of_kvikio", "translate", "translated"]

OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Nothing is wrong with the disk: it is full, or the user's quota is."""

READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""What is there may be read all the same."""


def translate(error: OSError, doing: str, path: Path, tier: str) -> NoSpace | TierError:
    """The error to raise, `from error`, when `doing` something to `path` failed."""
    reason = error.strerror or str(error)
    text = f"tier {tier}: cannot {doing} {path}: {reason}"
    if error.errno in OUT_OF_SPACE:
        return NoSpace(f"{text}; free some space there or lower the tier's capacity")
    if error.errno in READ_ONLY:
        return TierError(f"{text}; give the user of this process access to it", tier=tier)
    if error.errno == errno.EIO:
        return TierError(f"{text}; the disk may be failing, see the kernel log", tier=tier)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return TierError(f"{text}; raise the limit of open files (ulimit -n)", tier=tier)
    return TierError(text, tier=tier)


@contextmanager
def translated(doing: str, path: Path, tier: str) -> Iterator[None]:
    """Raise what `translate` gives for an `OSError` of the body.

    Raises:
        NoSpace: the disk or the quota is full.
        TierError: anything else.
    """
    try:
        yield
    except OSError as error:
        raise translate(error, doing, path, tier) from error


def of_kvikio(error: Exception) -> OSError:
    """The same as an error of the operating system. KvikIO's errors are RuntimeErrors whose text
    ends with what the system said; one that says nothing of the kind has no number."""
    text = str(error).strip()
    said = text.rpartition(": ")[2]
    if said == "EOF":
        return EndOfFile(errno.ENODATA, "end of file")
    number = next((code for code in errno.errorcode if os.strerror(code) == said), 0)
    return OSError(number, said if number else f"KvikIO: {text}")
