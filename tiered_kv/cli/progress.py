"""What a long command is doing, on stderr: a live line on a terminal, else a line per step."""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as LiveProgress

__all__ = ["Progress"]

_QUIET_SECONDS = 10.0
"""Between two lines of `advance` where there is no terminal."""


class Progress:
    """A context manager; stages are printed once each, steps move the bar.

    Inside the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does, and so does the end of the
    terminal (SIGHUP) where it is not ignored, as by nohup. Main thread only.
    """

    def __init__(self, steps: int = 0) -> None:
        """`steps` is how many steps there will be, as far as is known."""
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: LiveProgress | None = None
        self._began = time.monotonic()
        self._steps = steps
        self._advanced = 0
        self._told = self._began
        if self._console.is_terminal:
            self._live = LiveProgress(
                SpinnerColumn(),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("", total=steps or None)

    def __enter__(self) -> Self:
        # End as with Ctrl-C, so that neither engines nor directories stay behind.
        self._before = {
            one: signal.signal(one, signal.default_int_handler)
            for one in (signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(one) is not signal.SIG_IGN
        }
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        for one, before in self._before.items():
            signal.signal(one, before)

    def expect(self, steps: int) -> None:
        """Now it is known how many steps there will be."""
        self._steps = steps
        if self._live is not None:
            self._live.update(self._task, total=steps)

    def stage(self, text: str) -> None:
        """A new stage begins; its line stays."""
        elapsed = time.monotonic() - self._began
        self._console.print(f"[{elapsed:5.0f} s] {text}", markup=False)

    def step(self, text: str, steps: int = 1) -> None:
        """A step, or some that are one for the user, are done."""
        if self._live is None:
            self.stage(f"  {text}")
        else:
            self._live.update(self._task, advance=steps, description=text)

    def skip(self, steps: int) -> None:
        """So many steps need not be done."""
        if self._live is not None:
            self._live.update(self._task, advance=steps)

    def advance(self, steps: int, text: str) -> None:
        """Some of many small steps are done: a line every ten seconds, not one per step."""
        if self._live is not None:
            self._live.update(self._task, advance=steps, description=text)
            return
        self._advanced += steps
        if time.monotonic() - self._told >= _QUIET_SECONDS:
            self._told = time.monotonic()
            of = f" of {self._steps}" if self._steps else ""
            self.stage(f"  {text}: {self._advanced}{of}")
