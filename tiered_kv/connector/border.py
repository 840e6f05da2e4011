"""The border to the inference engine: no exception of ours crosses it after the start.

What the engine calls is wrapped by `guarded`, which says what the engine is told instead. Inside,
`Border.call` keeps one failing piece of work from taking its neighbours along, and
`Border.insist` does later what must be done and failed, such as giving something back.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tiered_kv.complaints import Complaints
from tiered_kv.stats import StatsRecorder

__all__ = ["Border", "Guarded", "guarded"]

logger = logging.getLogger(__name__)

MOST_DUE = 1024
"""So much that failed is kept to be tried again."""
MOST_TRIES = 100

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class Border:
    """Of one half of the connector. Its methods are called on the thread that owns the half, but
    for `call`, which is thread-safe. None raises."""

    def __init__(self, stats: StatsRecorder) -> None:
        """`stats` counts what was caught."""
        self._stats = stats
        self._complaints = Complaints(logger)
        self._due: deque[tuple[str, Callable[[], object], int]] = deque()

    @property
    def due(self) -> int:
        """Pieces of work that failed and are to be tried again."""
        return len(self._due)

    def call(self, where: str, work: Callable[[], R], otherwise: R) -> R:
        """The result of `work`, or `otherwise` where it raises."""
        try:
            return work()
        # Whatever it is, serving must not notice it.
        except Exception as error:  # noqa: BLE001
            self.caught(where, error)
            return otherwise

    def insist(self, where: str, work: Callable[[], object]) -> None:
        """Do it now; where it raises, try again at each `amend` until it does not. It must be
        harmless to do again what was done in part."""
        self._try(where, work, 1)

    def amend(self) -> None:
        """Try again what failed before. Call it once a step."""
        for _ in range(len(self._due)):
            self._try(*self._due.popleft())

    def _try(self, where: str, work: Callable[[], object], tries: int) -> None:
        try:
            work()
        # Whatever it is, serving must not notice it.
        except Exception as error:  # noqa: BLE001
            self.caught(where, error)
            if tries < MOST_TRIES and len(self._due) < MOST_DUE:
                self._due.append((where, work, tries + 1))

    def caught(self, where: str, error: Exception) -> None:
        """An error was caught at the border: log and count it."""
        self._complaints.about(where, error, "serving goes on without it")
        self._stats.internal_error(where)


class Guarded(Protocol):
    """What has guarded methods."""

    @property
    def border(self) -> Border:
        """Where their errors end."""
        ...


G = TypeVar("G", bound=Guarded)


def guarded(
    answer: Callable[..., A],
) -> Callable[[Callable[Concatenate[G, P], R]], Callable[Concatenate[G, P], R | A]]:
    """A method that the engine calls. What failed before is tried again first. Where the method
    raises, `answer` is called with the same arguments and says what the engine is told; it does
    what must be done all the same."""

    def wrap(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R | A]:
        where = method.__qualname__

        @functools.wraps(method)
        def inside(self: G, /, *args: P.args, **kwargs: P.kwargs) -> R | A:
            if self.border.due:
                self.border.amend()
            try:
                return method(self, *args, **kwargs)
            # Whatever it is, the engine does not survive it.
            except Exception as error:  # noqa: BLE001
                self.border.caught(where, error)
                return answer(self, *args, **kwargs)

        return inside

    return wrap
