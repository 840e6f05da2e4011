"""Disks of their own for tests: ext4 on a loop device, which the kernel can slow down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LoopDisk", "fill", "loop_disk", "throttling"]

_CGROUP = Path("/sys/fs/cgroup/blkio")


class LoopDisk:
    """A mounted file system."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        number = os.stat(device).st_rdev
        self._device = f"{os.major(number)}:{os.minor(number)}"

    def limit(self, bytes_per_second: int) -> None:
        """Let no process of the root control group read or write faster; 0: no limit. Needs
        `throttling()`."""
        for direction in ("read", "write"):
            file = _CGROUP / f"blkio.throttle.{direction}_bps_device"
            file.write_text(f"{self._device} {bytes_per_second}\n")


def throttling() -> bool:
    """Whether disks can be slowed down here: by root, where there is the blkio controller of
    control groups, version 1."""
    return os.geteuid() == 0 and (_CGROUP / "blkio.throttle.read_bps_device").exists()


@contextmanager
def loop_disk(scratch: Path, megabytes: int) -> Iterator[LoopDisk]:
    """An ext4 file system of this size below `scratch`; unmounted at the end. Needs root.

    Raises:
        subprocess.CalledProcessError: a step failed; its output says why.
    """
    image, folder = scratch / "disk.img", scratch / "disk"
    folder.mkdir()
    with image.open("wb") as out:
        out.truncate(megabytes * 2**20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    shown = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", str(image)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    device = shown.stdout.strip()
    try:
        subprocess.run(["mount", device, str(folder)], check=True)
        disk = LoopDisk(folder, device)
        try:
            yield disk
        finally:
            if throttling():
                disk.limit(0)
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def fill(file: Path) -> None:
    """Take all the space that is left."""
    with file.open("wb", buffering=0) as out:
        for size in (2**20, 4096):
            try:
                while out.write(bytes(size)):
                    pass
            except OSError as error:
                print(f"the disk is full: {error}")
