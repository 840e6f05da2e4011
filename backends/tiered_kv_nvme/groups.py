"""What the I/O engines of an nvme store are asked for, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["EndOfFile", "Group", "GroupIo"]


class EndOfFile(OSError):
    """The file ends before the bytes that were asked for."""


@dataclass(frozen=True, slots=True)
class Group:
    """One vectored call: contiguous in the file, scattered in memory."""

    fd: int
    offset: int
    views: tuple[memoryview, ...]
    """At most 1,024, aligned for the file's mode."""
    positions: tuple[int, ...]
    """For each view, which block of the caller's batch it belongs to."""


class GroupIo(Protocol):
    """An I/O engine. Thread-safe.

    The calls block until nothing touches the memory any more, also when some groups failed.
    """

    def read_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """Fill the groups' memory; gives an error per block that could not be read whole. What
        lies beside a place that cannot be read is read all the same.

        Raises:
            TierError: the engine was closed.
        """
        ...

    def write_groups(self, groups: Sequence[Group]) -> dict[int, OSError]:
        """Write the groups' memory; gives an error per block that may not be written whole.

        Raises:
            TierError: the engine was closed.
        """
        ...

    def flush(self, fds: Sequence[int]) -> None:
        """`fdatasync` each file.

        Raises:
            OSError: the first flush that failed, after all have ended.
            TierError: the engine was closed.
        """
        ...

    def modes(self) -> Mapping[str, str]:
        """What is in effect: `{"engine": "posix"}`."""
        ...

    def close(self, timeout: float = 5.0) -> bool:
        """Take no more calls; wait at most `timeout` seconds for those that run.

        True when all ended. Idempotent.
        """
        ...
