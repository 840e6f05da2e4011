"""The keys of all whole blocks of a namespace, read from the index in portions.

py-lmdb gives the GIL away for every record. Beside a busy thread that makes a scan of a million
blocks take minutes, and alone it takes the GIL for seconds. So where there are many, a child
process reads them and sends the keys through a pipe: frames of a length, a number of bytes, and so
many keys of that length.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from itertools import groupby
from typing import IO

import lmdb

from tiered_kv.index.directory import DATA
from tiered_kv.index.environment import Environment
from tiered_kv.index.records import BlockRecord
from tiered_kv.index.transactions import Database, Transaction
from tiered_kv.values import BlockKey

__all__ = ["ListingFailed", "list_apart", "list_some"]

_FRAME = struct.Struct("<HI")
_END = _FRAME.pack(0, 0)
_PORTION_KEYS = 16_384
_PIPE_BYTES = 2**20
_END_SECONDS = 5.0
_FIRST_SECONDS = 0.0
"""How long to wait for the child before the caller is told that it has not begun."""
_NICE = 10
"""Whoever serves goes first."""


class ListingFailed(Exception):
    """The child ended before it had sent all; the message says how."""


def list_some(
    txn: Transaction, blocks: Database, prefix: bytes, start: bytes, most: int
) -> tuple[list[BlockKey], bytes]:
    """Keys, without their prefix, of the whole blocks among the next `most` records from `start`
    on, and where to go on: empty at the end."""
    found: list[BlockKey] = []
    with txn.cursor(blocks) as cursor:
        more = cursor.set_range(start)
        for _ in range(most):
            name = cursor.key() if more else b""
            if not name.startswith(prefix):
                return found, b""
            record = BlockRecord.unpack(name, cursor.value())
            if record is not None and record.whole:
                found.append(BlockKey(name[len(prefix) :]))
            start = name + b"\0"
            more = cursor.next()
    return found, start


def list_apart(
    environment: Environment, prefix: bytes
) -> Generator[list[BlockKey] | None, None, None]:
    """Portions of the keys, without their prefix, in order; before the first one None, as long as
    the child has not begun. Holds no transaction.

    Raises:
        ListingFailed: not all came.
    """
    code = "from tiered_kv.index import listing; listing.send()"
    path = environment.path
    locks = environment.modes()["reader_locks"]
    try:
        map_bytes = max(environment.map_bytes, (path / DATA).stat().st_size)
        arguments = [str(path), str(map_bytes), locks, prefix.hex()]
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
        )
    except OSError as error:
        raise ListingFailed(f"no child process could be started: {error}") from error
    assert child.stdout is not None
    try:
        with child.stdout as pipe:
            with suppress(OSError):  # fewer and larger reads, where it is allowed
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            while not _has_begun(pipe):
                yield None
            while len(head := pipe.read(_FRAME.size)) == _FRAME.size and head != _END:
                length, size = _FRAME.unpack(head)
                data = pipe.read(size)
                if len(data) < size:
                    break
                yield [BlockKey(data[at : at + length]) for at in range(0, size, length)]
        if head != _END:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)
            how = child.returncode
            raise ListingFailed(f"the child process ended with {how} before it had sent all")
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # its disk hangs
            child.wait(_END_SECONDS)


def _has_begun(pipe: IO[bytes]) -> bool:
    # Not select, which takes no descriptor beyond 1,023: an engine may have more open.
    watched = select.poll()
    watched.register(pipe, select.POLLIN)
    return bool(watched.poll(_FIRST_SECONDS * 1_000))


def send() -> None:
    """The child's part: write the keys to the standard output."""
    path, map_bytes, locks, prefix = sys.argv[1:]
    os.nice(_NICE)
    environment = lmdb.Environment(
        path,
        map_size=int(map_bytes),
        readonly=True,
        create=False,
        lock=locks == "on",
        max_dbs=1,
        lib_version=0,
    )
    blocks = environment.open_db(b"blocks", create=False)
    names = bytes.fromhex(prefix)
    start = names
    out = sys.stdout.buffer
    while start:
        with environment.begin() as txn:
            found, start = list_some(txn, blocks, names, start, _PORTION_KEYS)
        for length, same in groupby(found, len):
            data = b"".join(same)
            out.write(_FRAME.pack(length, len(data)) + data)
        out.flush()
    out.write(_END)
    out.flush()
