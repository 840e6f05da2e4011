"""Checks the structure of a `data.mdb` without LMDB, in a process of its own.

LMDB trusts its file: a bad page can kill the process that maps it. The check is a walk in plain
Python, seconds for a million rows, which would keep the engine from running for as long. So
`find_damage` has a child process do it, which imports nothing but the walk.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from lmdb import verify

__all__ = ["DamageUnknown", "check", "find_damage"]

_LEAST_SECONDS = 60.0
_LEAST_BYTES_PER_SECOND = 8 * 2**20
_END_SECONDS = 5.0

logger = logging.getLogger(__name__)


class DamageUnknown(Exception):
    """The check gave no answer; the message says why."""


def find_damage(data: Path) -> str | None:
    """What is wrong with the structure of the file `data`; None where nothing is.

    Waits at most a minute, and a second more for each 8 MiB.

    Raises:
        DamageUnknown: the check was killed, or took too long.
        OSError: the file cannot be read.
    """
    size = data.stat().st_size
    logger.info("%s was not closed in good order: %d bytes are checked first", data, size)
    seconds = _LEAST_SECONDS + size / _LEAST_BYTES_PER_SECOND
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), str(data)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except OSError as error:
        logger.warning("%s is checked in this process: no child could be started: %s", data, error)
        return check(data)
    try:
        answer, said = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        child.kill()
        try:
            child.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("process %d, which reads %s, cannot be killed", child.pid, data)
        raise DamageUnknown(f"the check has not ended in {seconds:.0f} s; the disk may hang") from (
            error
        )
    except BaseException:
        child.kill()
        raise
    if child.returncode < 0:
        raise DamageUnknown(
            f"the process that checked it was killed by signal {-child.returncode}; it takes about "
            "as much memory as a Python program of 50 MiB"
        )
    try:
        found = json.loads(answer)
        code, problem = found["errno"], found["problem"]
    except (ValueError, KeyError, TypeError):
        last = said.strip().rpartition("\n")[2]
        logger.warning("%s is checked in this process: the child ended with %s", data, last)
        return check(data)
    if code is not None:
        raise OSError(code, os.strerror(code), str(data))
    return None if problem is None else str(problem)


def check(data: Path) -> str | None:
    """What `find_damage` answers, found in this thread: about 1.5 s for a million rows.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        problems: list[str] = verify.verify(str(data), subdir=False)  # type: ignore[no-untyped-call]
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - on garbage the checker may fail in any way
        return f"{type(error).__name__}: {error}"
    return f"{problems[0]} ({len(problems)} problems)" if problems else None


def _main(data: str) -> None:
    """The child's part: write the answer as JSON."""
    answer: dict[str, str | int | None] = {"errno": None, "problem": None}
    try:
        answer["problem"] = check(Path(data))
    except OSError as error:
        answer["errno"] = error.errno
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
