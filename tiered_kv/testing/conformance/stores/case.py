"""How a store is told to its suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from tiered_kv.contracts import BlockStore, StoreMaintenance
from tiered_kv.testing.conformance.blocks import CAPACITY, StoreArguments
from tiered_kv.testing.conformance.children import Opener

__all__ = ["OpenStore", "StoreCase", "StoreFixtures"]


@dataclass(frozen=True, slots=True)
class StoreCase:
    """A store under test. The last fields are capabilities: what the store cannot do is set to
    False, and the checks of it are skipped with that name. All of them are expected of a store on
    a local disk."""

    open: Opener
    """Opens the store for these arguments: a function of a module, or a `functools.partial` of
    one, since child processes import it. That module should import no pytest and no torch:
    children are started often."""
    capacity: int = CAPACITY
    """Budget in bytes with which most checks open the store; at least 8 MiB."""
    sizes: tuple[int, ...] = (1, 2, 511, 513, 4095, 4096, 4097, 65_537, 1_048_576, 3_098_112)
    """Lengths in bytes of blocks that come back bit for bit; their sum fits `capacity`."""
    kills: int = 4
    """How often a process that stores is killed: a few per commit, hundreds at night."""
    examples: int = 6
    """How many histories the state machine runs, of up to 30 steps; half as many where not all
    fits the capacity, a third where processes die. Hundreds at night, with a time-out for each
    check to match."""

    open_maintenance: Callable[[StoreArguments], StoreMaintenance] | None = None
    """Opens what looks after the tier as a whole, of which `path`, `capacity`, `writable` and
    `extra` matter; without it, nothing of that is checked."""
    bounded: bool = True
    """It keeps to `StoreArguments.capacity` by evicting; without, the budget checks say nothing."""
    recency: bool = True
    """What was touched last goes last."""
    keeps_log: bool = True
    """`changes` answers with the changes, not always with a restart."""
    directory: bool = True
    """All that it stores is in files below `StoreArguments.path`, readable by their owner only."""
    plain_bytes: bool = True
    """A block's bytes, but for the first 64 or fewer, lie together, as they are, in one of those
    files."""
    plain_files: bool = True
    """It works, if slower, where the file system refuses direct I/O or takes no space ahead."""
    reopens: bool = True
    """Blocks are there again when the store was closed and is opened again."""
    shared_between_processes: bool = True
    """Several processes see the same blocks."""
    survives_kill: bool = True
    """Published blocks are there after SIGKILL, and what was not published is gone."""
    drops_at_once: bool = True
    """The parts of a block go together, also when the process that drops it is killed meanwhile."""
    guards_fork: bool = True
    """A forked child that uses its parent's store gets a `TierError` that says so."""

    def needs(self, *capabilities: str) -> None:
        """Skip the running check, by name, where the case lacks one of these capabilities."""
        for name in capabilities:
            if not getattr(self, name):
                pytest.skip(f"the case declares {name}={getattr(self, name)}")


class OpenStore(Protocol):
    """Opens the check's store with these changes of its arguments; it is closed afterwards."""

    def __call__(self, **changes: object) -> BlockStore:
        """`changes` name fields of `StoreArguments`."""
        ...


class StoreFixtures:
    """What all checks of a store use. An instance overrides `case`."""

    @pytest.fixture
    def case(self) -> StoreCase:
        """The store under test."""
        raise NotImplementedError(
            f"{type(self).__name__} has no fixture `case` that returns a StoreCase"
        )

    @pytest.fixture
    def arguments(self, case: StoreCase, tmp_path: Path) -> StoreArguments:
        """How the store of this check is opened; the directory is made by the store."""
        return StoreArguments(tmp_path / "tier", case.capacity)

    @pytest.fixture
    def open_store(self, case: StoreCase, arguments: StoreArguments) -> Iterator[OpenStore]:
        """Opens it, also several times; what a check opens is closed after it."""
        opened: list[BlockStore] = []

        def open_it(**changes: object) -> BlockStore:
            opened.append(case.open(arguments.with_(**changes)))
            return opened[-1]

        yield open_it
        for store in opened:
            store.close()
