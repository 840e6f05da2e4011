"""Which handler serves which hop: made when a tier's store is open, replaced when another store
takes its place or the engine's caches are other ones, while calls run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tiered_kv.contracts import BlockStore, TransferHandler
from tiered_kv.engine.attached import Attached, Tenure
from tiered_kv.engine.health import NOT_IN_USE, HealthBoard
from tiered_kv.engine.hops import LiveHop
from tiered_kv.errors import UnsupportedError
from tiered_kv.routing import CPU_ENDPOINT, GPU_ENDPOINT, Hop

__all__ = ["Attachments"]

logger = logging.getLogger(__name__)


class Attachments:
    """The handlers of all hops. Thread-safe; making handlers may block, `detach` never does."""

    def __init__(
        self,
        hops: Mapping[Hop, LiveHop],
        board: HealthBoard,
        *,
        make: Callable[[Hop, BlockStore | None], TransferHandler[Any, Any]],
        attached: Callable[[Hop], None],
        has_caches: Callable[[], bool],
    ) -> None:
        """
        Args:
            hops: all hops.
            board: where hops are opened, and closed with the reason.
            make: makes the handler of a hop, for the store of its tier.
            attached: told of each hop that has got a handler for a store.
            has_caches: whether the engine's caches are registered.
        """
        self._hops = hops
        self._board = board
        self._make = make
        self._attached = attached
        self._has_caches = has_caches
        self._lock = threading.Lock()
        """For what is quick: which handler serves, and whether any may."""
        self._making = {hop.tier: threading.Lock() for hop in hops}
        """One at a time makes the handlers of a tier."""
        self._tenures: dict[str, tuple[BlockStore, Tenure]] = {}
        self._closed = False

    def attach_memory(self) -> None:
        """Make the handlers between the engine's caches and host slots, anew where there are some.

        Raises:
            RefuseToStart: the caches cannot be copied safely; then all is as it was.
        """
        made: dict[Hop, Attached] = {}
        for hop in self._hops:
            if not self._usable(hop):
                self._board.unusable(
                    hop, f"{NOT_IN_USE}: the engine's KV caches are not registered"
                )
            elif hop.tier == CPU_ENDPOINT.tier:
                made[hop] = Attached(hop.label, self._make(hop, None), None)
        for hop, one in made.items():
            self._swap(hop, one)

    def attach(
        self,
        tier: str,
        store: BlockStore,
        released: Callable[[], None],
        wanted: Callable[[], bool],
    ) -> bool:
        """Make handlers for a tier's store and use them from now on; see
        `TransferEngine.attach`."""
        with self._making[tier]:
            tenure = Tenure(released)
            made = self._make_all((hop for hop in self._hops if hop.tier == tier), store, tenure)
            with self._lock:
                accepted = not self._closed and wanted()
                before = self._tenures.get(tier) if accepted else None
                if accepted:
                    self._tenures[tier] = store, tenure
                    retired = [self._put(hop, made.get(hop)) for hop in self._hops_of(tier)]
                else:
                    retired = list(made.values())
            self._retire(retired)
            if not accepted:
                tenure.end()
                return False
            if before is not None:
                before[1].end()
            self._announce(made)
            return True

    def detach(self, tier: str, reason: str) -> None:
        """Nothing goes to or from the tier's store any more; see `TransferEngine.detach`."""
        with self._lock:
            before = self._tenures.pop(tier, None)
            retired = [self._put(hop, None) for hop in self._hops_of(tier)]
            self._board.tier_unusable(tier, reason)
        self._retire(retired)
        if before is not None:
            before[1].end()

    def renew(self) -> None:
        """The engine's caches are other ones: make the handlers that copy from and to them anew.

        Raises:
            RefuseToStart: the caches cannot be copied safely.
        """
        self.attach_memory()
        for tier, making in self._making.items():
            with making:
                with self._lock:
                    held = self._tenures.get(tier)
                if held is None:
                    continue
                store, tenure = held
                of_engine = [h for h in self._hops_of(tier) if GPU_ENDPOINT in (h.src, h.dst)]
                made = self._make_all(of_engine, store, tenure)
                with self._lock:
                    current = self._tenures.get(tier) == held
                    if current:
                        retired = [self._put(hop, made.get(hop)) for hop in of_engine]
                    else:
                        retired = list(made.values())
                self._retire(retired)
                if current:
                    self._announce(made)

    def close(self, until: float) -> None:
        """Close the handlers on which no call runs; wait for that until `until` (monotonic
        seconds). The stores stay open: they are their opener's."""
        with self._lock:
            self._closed = True
            serving = [live.attached for live in self._hops.values() if live.attached is not None]
        threads = [one.retire() for one in serving]
        for thread in threads:
            if thread is not None:
                thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------------------------ inside

    def _hops_of(self, tier: str) -> list[Hop]:
        return [hop for hop in self._hops if hop.tier == tier]

    def _usable(self, hop: Hop) -> bool:
        return self._has_caches() or GPU_ENDPOINT not in (hop.src, hop.dst)

    def _make_all(
        self, hops: Iterable[Hop], store: BlockStore, tenure: Tenure
    ) -> dict[Hop, Attached]:
        """Handlers for the hops where one can be made; the others are out of use, and say why."""
        made: dict[Hop, Attached] = {}
        for hop in hops:
            if not self._usable(hop):
                continue
            try:
                one = Attached(hop.label, self._make(hop, store), store)
            except UnsupportedError as error:
                logger.info("%s is %s: %s", hop, NOT_IN_USE, error)
                self._board.unusable(hop, f"{NOT_IN_USE}: {error}")
            except Exception as error:  # a plug-in may raise anything; its hop is out, not serving
                logger.exception("%s stays out of use: its handler could not be made", hop.label)
                self._board.unusable(hop, f"its handler could not be made: {error}")
            else:
                one.serve(tenure)
                made[hop] = one
        return made

    def _put(self, hop: Hop, one: Attached | None) -> Attached | None:
        """Let it serve the hop; the one that did. Under the lock."""
        live = self._hops[hop]
        before, live.attached = live.attached, one
        return before

    def _swap(self, hop: Hop, one: Attached) -> None:
        with self._lock:
            before = self._put(hop, one)
        self._retire([before])
        self._board.open(hop)

    def _retire(self, many: Iterable[Attached | None]) -> None:
        for one in many:
            if one is not None:
                one.retire()

    def _announce(self, made: Mapping[Hop, Attached]) -> None:
        for hop, one in made.items():
            self._attached(hop)
            with self._lock:  # detached meanwhile: it stays out of use
                serves = self._hops[hop].attached is one
                if serves:
                    self._board.open(hop)
            if serves:
                logger.info("%s is in use: %s", hop, dict(self._hops[hop].modes or {}))
