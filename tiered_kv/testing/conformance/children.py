"""What the store suite runs in child processes. Imports neither pytest nor torch: a child that is
killed, and started anew, should be quick to start."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tiered_kv.contracts import BlockStore
from tiered_kv.testing.conformance.blocks import (
    StoreArguments,
    aligned_copy,
    assert_held,
    content,
    keys,
    new_block,
    put,
    reserved,
)

__all__ = [
    "BATCH",
    "Opener",
    "replace_blocks",
    "run_until_stage",
    "start",
    "store_for_ever",
    "store_shuffled",
]

Opener = Callable[[StoreArguments], BlockStore]
"""Opens a store; child processes import it by its name."""

BATCH = 4
"""Blocks per batch of `store_for_ever`."""

_JOIN_SECONDS = 60.0


def start(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """Run `target` in a process of its own, that inherits nothing."""
    child = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    child.start()
    return child


def run_until_stage(
    opener: Opener, arguments: StoreArguments, first: int, stages: int
) -> tuple[str, list[int]]:
    """Let a child store blocks from number `first` on, and kill it with SIGKILL at the n-th stage
    that it tells: (that stage, the numbers it had published)."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    child = start(store_for_ever, opener, arguments, first, theirs)
    theirs.close()
    published: list[int] = []
    last = "nothing"
    try:
        while True:
            last, numbers = ours.recv()
            published.extend(numbers)
            stages -= 1
            if stages == 0 and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
    except EOFError:
        child.join(_JOIN_SECONDS)
    ours.close()
    if child.exitcode != -signal.SIGKILL:
        raise RuntimeError(
            f"the child that stores ended with {child.exitcode} after {last}, before it was killed"
        )
    return last, published


def store_for_ever(opener: Opener, arguments: StoreArguments, first: int, out: Connection) -> None:
    """Child process: stores batch after batch and tells each stage before it begins."""
    store = opener(arguments)
    while True:
        numbers = list(range(first, first + BATCH))
        out.send(("reserve", []))
        places = reserved(store, [new_block(n) for n in numbers])
        out.send(("write", []))
        store.write(places, [aligned_copy(content(n)) for n in numbers])
        out.send(("publish", []))
        store.publish(places)
        out.send(("published", numbers))
        first += BATCH


def store_shuffled(opener: Opener, arguments: StoreArguments, count: int, seed: int) -> None:
    """Child process: stores `count` blocks in an order of its own."""
    store = opener(arguments)
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    for first in range(0, count, 6):
        put(store, numbers[first : first + 6])
    assert_held(store, numbers)
    store.close()


def replace_blocks(opener: Opener, arguments: StoreArguments) -> None:
    """Child process: finds blocks 0 to 4, removes 0 and 1, stores 50."""
    store = opener(arguments)
    assert_held(store, range(5))
    if (dropped := store.delete(keys([0, 1]))) != 2:
        raise RuntimeError(f"{dropped} blocks were deleted, not 2")
    put(store, [50])
    store.close()
