"""The typed registry: a pair of spec classes (source, destination) -> handler factory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tiered_kv.contracts import HandlerContext, HandlerFactory, TransferHandler
from tiered_kv.errors import PluginError
from tiered_kv.specs import LoadStoreSpec

__all__ = ["RegisteredPair", "TransferRegistry"]

S = TypeVar("S", bound=LoadStoreSpec)
D = TypeVar("D", bound=LoadStoreSpec)


@dataclass(frozen=True, slots=True)
class RegisteredPair:
    """One entry: who moves blocks from `src` to `dst`."""

    src: type[LoadStoreSpec]
    dst: type[LoadStoreSpec]
    factory: HandlerFactory[Any, Any]
    provider: str
    """Name of the backend that registered the pair."""
    missing: Callable[[Any], str | None]
    """See `TransferRegistry.register`."""

    def __str__(self) -> str:
        return f"{self.src.medium} -> {self.dst.medium} ({self.provider})"


def _nothing(settings: Any) -> str | None:
    return None


class TransferRegistry:
    """Maps (source spec class, destination spec class) to a handler factory.

    An object with a lifetime: each deployment has its own. Looking up never changes it. Filled by
    one thread, then read by any.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], RegisteredPair] = {}
        self._plain: dict[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], str] = {}
        """Who registered the pair without override."""

    def register(
        self,
        src: type[S],
        dst: type[D],
        factory: HandlerFactory[S, D],
        *,
        provider: str,
        override: bool = False,
        missing: Callable[[Any], str | None] = _nothing,
    ) -> None:
        """Claim the pair (`src`, `dst`). With `override` it is taken from whoever registers it
        without, earlier or later; of several, the latest has it.

        `missing` is given a tier's settings and says what this machine, or those settings, lack for
        the pair to be used, as far as that can be told without opening anything; None: nothing. It
        is for people who ask beforehand: the factory decides, and raises `UnsupportedError`.

        Raises:
            PluginError: two providers claim the pair without `override` (both are named), or two
                spec classes claim one medium.
        """
        for side in (src, dst):
            for known in self.media():
                if known.medium == side.medium and known is not side:
                    raise PluginError(
                        f"medium {side.medium!r} is claimed by two spec classes, "
                        f"{known.__module__}.{known.__qualname__} and "
                        f"{side.__module__}.{side.__qualname__} (from {provider}); "
                        "rename the medium of one of them"
                    )
        if not override:
            if (src, dst) in self._plain:
                raise PluginError(
                    f"{src.medium} -> {dst.medium} is registered by both "
                    f"{self._plain[src, dst]!r} and {provider!r}; uninstall one of them or "
                    "register with override=True"
                )
            self._plain[src, dst] = provider
            if (src, dst) in self._pairs:
                return
        self._pairs[src, dst] = RegisteredPair(src, dst, factory, provider, missing)

    def handler(self, src: type[S], dst: type[D], context: HandlerContext) -> TransferHandler[S, D]:
        """Make the handler of a pair.

        Raises:
            KeyError: nothing is registered for the pair.
        """
        return self.pair(src, dst).factory(context)

    def pair(self, src: type[LoadStoreSpec], dst: type[LoadStoreSpec]) -> RegisteredPair:
        """The entry of a pair.

        Raises:
            KeyError: nothing is registered for the pair.
        """
        return self._pairs[src, dst]

    def media(self) -> set[type[LoadStoreSpec]]:
        """All spec classes that occur in a pair."""
        return {side for pair in self._pairs for side in pair}

    def __iter__(self) -> Iterator[RegisteredPair]:
        return iter(self._pairs.values())

    def __contains__(self, pair: tuple[type[LoadStoreSpec], type[LoadStoreSpec]]) -> bool:
        return pair in self._pairs
