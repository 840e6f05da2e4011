"""What a running process knows right now, for whoever asks on the same machine: `tiered-kv top`.

An idle engine takes no steps, so that what it hands on with its steps grows old. Each half
therefore answers on an abstract socket of its own (unix(7)): no file, so that nothing is left when
the process dies, and nothing to be found from another network namespace. It answers its own user
and root alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from tiered_kv.stats import LoadRate, StatsSnapshot
from tiered_kv.values import GroupGeometry

__all__ = ["Answering", "LiveCache", "LiveTier", "LiveView", "ask_all"]

logger = logging.getLogger(__name__)

PREFIX = "tiered-kv"
ANSWER_SECONDS = 1.0
"""Longest that one answer may take; the next one waits for it."""

MOST_BYTES = 64 * 2**20
"""A longer answer is nobody's of ours."""

SAME_NAME = 16
"""Halves of one name in one process at most, as in tests."""

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class LiveTier:
    """A tier as a process finds it."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class LiveCache:
    """Shape of an engine's KV cache."""

    bytes_per_token: float
    """Over all ranks and KV groups."""
    block_tokens: int
    """Of a block of the first KV group."""
    ranks: int
    host_tier: str
    """Name of the cpu tier; empty where there is none."""

    @classmethod
    def of(cls, groups: Sequence[GroupGeometry], ranks: int, host_tier: str | None) -> Self:
        """From the groups of one rank's part."""
        per_rank = sum(group.block_bytes / group.tokens for group in groups)
        return cls(per_rank * ranks, groups[0].tokens, ranks, host_tier or "")


@dataclass(frozen=True, slots=True)
class LiveView:
    """What one half of a connector says."""

    source: str
    """`manager`, or `rank 0`."""
    namespace: str
    """The namespace's id, in hexadecimal."""
    pid: int
    tiers: Mapping[str, LiveTier]
    """Empty for a manager, which does no I/O."""
    modes: Mapping[str, Mapping[str, str]]
    """What is in effect, by hop."""
    stats: StatsSnapshot
    cache: LiveCache | None = None
    """Told by managers."""
    load_rates: Mapping[str, LoadRate] = field(default_factory=dict)
    """By tier, of the slowest rank, for its own part of the bytes. Told by managers."""

    def to_json(self) -> str:
        """One line of JSON."""
        plain = {
            "source": self.source,
            "namespace": self.namespace,
            "pid": self.pid,
            "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
            "modes": {hop: dict(modes) for hop, modes in self.modes.items()},
            "stats": self.stats.as_dict(),
            "cache": None if self.cache is None else asdict(self.cache),
            "load_rates": {name: asdict(rate) for name, rate in self.load_rates.items()},
        }
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is not what `to_json` gives.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            return cls(
                str(plain["source"]),
                str(plain["namespace"]),
                int(plain["pid"]),
                {str(name): LiveTier(**tier) for name, tier in plain["tiers"].items()},
                {
                    str(hop): {str(name): str(mode) for name, mode in modes.items()}
                    for hop, modes in plain["modes"].items()
                },
                StatsSnapshot.from_dict(plain["stats"]),
                None if plain["cache"] is None else LiveCache(**plain["cache"]),
                {str(name): LoadRate(**rate) for name, rate in plain["load_rates"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no view of this version: {error!r}") from error


class Answering:
    """Answers whoever asks, on a daemon thread of its own."""

    def __init__(self, source: str, view: Callable[[], LiveView]) -> None:
        """`view` is called on that thread for each question; it must not wait for a tier.

        Where no socket can be had, nobody is answered, which is said in the log.
        """
        self._view = view
        self._closed = False
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        try:
            self._socket = _listening(source)
            self._thread = threading.Thread(
                target=self._run, args=(self._socket,), name="tiered-kv-live", daemon=True
            )
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no such sockets here, or no thread to be had
            logger.warning("%s cannot be asked by `tiered-kv top`: %s", source, error)
            self.close()

    def _run(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                asking, _ = listening.accept()
            except OSError:  # closed
                return
            with asking:
                asking.settimeout(ANSWER_SECONDS)
                with contextlib.suppress(OSError):  # whoever asked has gone, or does not read
                    if _peer(asking) in (0, os.geteuid()):
                        asking.sendall(self._answer())

    def _answer(self) -> bytes:
        try:
            return self._view().to_json().encode()
        except Exception:  # the next one who asks is answered all the same
            logger.exception("a question of `tiered-kv top` was not answered")
            return b""

    def close(self) -> None:
        """Answer nobody any more. Idempotent."""
        self._closed = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._socket.close()


def _listening(source: str) -> socket.socket:
    name = source.replace(" ", "-")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for number in range(SAME_NAME):
            try:
                made.bind(f"\0{PREFIX}/{os.geteuid()}/{os.getpid()}/{name}/{number}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            made.listen(8)
            return made
        raise OSError(f"this process has {SAME_NAME} halves named {source!r} already")
    except BaseException:
        made.close()
        raise


def _peer(asking: socket.socket) -> int:
    """User id of whoever asks."""
    raw = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(raw)
    return int(user)


def ask_all(timeout: float = 2 * ANSWER_SECONDS) -> list[LiveView]:
    """What every half on this machine says that runs in this network namespace and may be asked
    by this user; sorted. Those that do not answer within `timeout` seconds are left out."""
    views: list[LiveView] = []
    for address in _addresses():
        try:
            views.append(LiveView.from_json(_ask(address, timeout)))
        except (OSError, ValueError) as error:
            logger.debug("%r does not answer: %s", address, error)
    return sorted(views, key=lambda view: (view.namespace, view.source, view.pid))


def _addresses() -> list[str]:
    """Addresses that name a half, as the kernel lists them."""
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    names = {line.split()[-1] for line in lines if f" @{PREFIX}/" in line}
    return sorted("\0" + name[1:] for name in names)


def _ask(address: str, timeout: float) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(timeout)
        asking.connect(address)
        if _peer(asking) not in (0, os.geteuid()):
            raise OSError("it belongs to another user")
        received = bytearray()
        while piece := asking.recv(2**16):
            received += piece
            if len(received) > MOST_BYTES:
                raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
    return received.decode()
