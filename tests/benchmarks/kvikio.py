"""The nvme tier's I/O engine `kvikio` beside `posix`, on host memory.

Both engines get the same groups of 4 MiB, contiguous in the file and in memory, whole batches at
once. Where there is no CUDA driver KvikIO runs under the fake one of the tests: it asks the driver
about each pointer and then moves host memory by itself, the same way as on a machine with a GPU.

    python -m tests.benchmarks.kvikio --path /mnt/nvme0 --json kvikio.json
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from tests.benchmarks.harness import (
    KIB,
    MIB,
    Batch,
    Ratio,
    Result,
    Variant,
    arguments,
    main,
    measure,
    ratio,
    workspace,
)
from tests.fakes.cuda_driver import FakeCudaDriver
from tests.fakes.kvikio_process import cufile_environment
from tiered_kv.memory import HostBlockPool
from tiered_kv_nvme.groups import Group, GroupIo
from tiered_kv_nvme.kvikio_io import KvikioFiles, KvikioIo
from tiered_kv_nvme.plan import Piece, plan
from tiered_kv_nvme.posix import PosixIo, probe_direct

BATCHES = (
    Batch(64 * KIB, 512),
    Batch(256 * KIB, 256),
    Batch(MIB, 96),
    Batch(4 * MIB, 32),
)
FLOOR = 0.8
NOT_INITIALIZED = 3
"""`CUDA_ERROR_NOT_INITIALIZED`: KvikIO then takes all memory for the host's."""


def run(options: argparse.Namespace, batch: Batch, directory: Path) -> Result:
    """All variants of one batch."""
    direct = probe_direct(directory)
    if not direct.direct:
        raise SystemExit(f"the engine kvikio needs direct I/O; {directory} is {direct}")
    with ExitStack() as stack:
        fd = os.open(directory / "blocks", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, batch.total_bytes)
        files = KvikioFiles(writable=True)
        stack.callback(files.forget, fd)
        pool = HostBlockPool(batch.blocks, 0, batch.block_bytes)
        stack.callback(pool.close)
        rng = np.random.default_rng(0)
        arrays = [pool.as_array(number) for number in range(batch.blocks)]
        content = rng.integers(0, 256, (batch.blocks, batch.block_bytes), np.uint8)
        for array, block in zip(arrays, content, strict=True):
            array[:] = block
        pieces = [
            Piece(number, 0, number * batch.block_bytes, array.data)
            for number, array in enumerate(arrays)
        ]
        groups = plan(pieces, {0: fd}, writing=True).groups
        posix = stack.enter_context(
            closing(PosixIo(options.threads, "bench", alignment=direct.alignment))
        )
        helper = PosixIo(options.threads, "bench", alignment=direct.alignment)
        engine = stack.enter_context(closing(KvikioIo(files, helper, "bench")))

        def wipe() -> None:
            for array in arrays:
                array.fill(0)

        def check() -> None:
            for array, block in zip(arrays, content, strict=True):
                if not np.array_equal(array, block):
                    raise RuntimeError("what was read is not what was written")

        timings = measure(
            [
                *(
                    Variant(f"{name} write", _writing(io, groups), check)
                    for name, io in (("posix", posix), ("kvikio", engine))
                ),
                *(
                    Variant(f"{name} read", _reading(io, groups), wipe)
                    for name, io in (("posix", posix), ("kvikio", engine))
                ),
            ],
            batch,
            options.rounds,
            settle=True,
        )
        check()
        notes = {
            "kvikio": ", ".join(f"{name} {value}" for name, value in engine.modes().items()),
            "driver": "the fake one of the tests" if options.fake else "the machine's",
            "groups": f"{len(groups)} of {sum(v.nbytes for v in groups[0].views) // KIB} KiB, "
            f"posix in {options.threads} threads",
        }

    def to_posix(what: str) -> Ratio:
        return ratio(timings, f"kvikio {what}", f"posix {what}", floor=FLOOR)

    return Result(batch, options.rounds, timings, (to_posix("write"), to_posix("read")), notes)


def _failed(failed: dict[int, OSError]) -> None:
    for error in failed.values():
        raise error


def _writing(io: GroupIo, groups: Sequence[Group]) -> Callable[[], None]:
    return lambda: _failed(io.write_groups(groups))


def _reading(io: GroupIo, groups: Sequence[Group]) -> Callable[[], None]:
    return lambda: _failed(io.read_groups(groups))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = arguments("I/O engine kvikio against posix on host memory", BATCHES)
    parser.add_argument("--threads", type=int, default=4, help="threads of the posix engine (4)")
    return parser.parse_args()


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _with_cufile() -> None:
    """Start anew where the loader would not find libcufile: it looks at its path once only."""
    wanted = cufile_environment()["LD_LIBRARY_PATH"]
    path = os.environ.get("LD_LIBRARY_PATH", "")
    if wanted not in path.split(os.pathsep):
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([wanted, *filter(None, [path])])
        os.execv(sys.executable, [sys.executable, "-m", "tests.benchmarks.kvikio", *sys.argv[1:]])


if __name__ == "__main__":
    options = parse()
    _with_cufile()
    options.fake = not _has_driver()
    with workspace(None) as folder, ExitStack() as stack:
        driver = FakeCudaDriver(folder) if options.fake else None
        if driver is not None:
            # As a driver without devices answers. Finding out by itself that memory is not a
            # device's takes the fake one a hundred times as long as a real one.
            stack.enter_context(driver.fail("cuPointerGetAttributes", result=NOT_INITIALIZED))
        code = main("kvikio", options, BATCHES, lambda *where: run(options, *where))
        if driver is not None:
            print(f"\nKvikIO asked the fake driver {sum(driver.calls().values())} times")
    sys.exit(code)
