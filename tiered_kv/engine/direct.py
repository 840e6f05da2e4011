"""What the direct hops of a rank, between the engine's device and stores, have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from tiered_kv.contracts import DeviceStaging
from tiered_kv.errors import UnsupportedError
from tiered_kv.memory import KVCaches
from tiered_kv.routing import Hop
from tiered_kv.values import CacheGeometry, ChecksumKind

__all__ = ["DeviceStagingFactory", "DirectHops"]

DeviceStagingFactory = Callable[[KVCaches, CacheGeometry, int], DeviceStaging]
"""Like `tiered_kv.memory.make_staging`: staging of at most so many bytes, at least two areas."""

DEVICE_STAGING_BYTES = 64 * 2**20
"""What all direct hops of a rank may take of the engine's device together."""


class DirectHops:
    """Shares out the staging on the engine's device, and says which checksum blocks get that may go
    either way. Thread-safe: `attached` and the factories are called where tiers are opened."""

    def __init__(
        self,
        hops: Iterable[Hop],
        geometry: CacheGeometry,
        caches: KVCaches | None,
        make: DeviceStagingFactory,
    ) -> None:
        """`hops` are all that routing knows; each direct one gets an even share."""
        count = sum(hop.direct for hop in hops)
        self._share = DEVICE_STAGING_BYTES // max(1, count)
        self._geometry = geometry
        self._caches = caches
        self._make = make
        self._in_use = False

    def staging_of(self, hop: Hop) -> Callable[[], DeviceStaging]:
        """For a handler's context: makes the hop's staging when first called, and gives the same
        one from then on.

        The returned function raises `UnsupportedError` where there are no caches, where their
        device has no staging to give, or where the hop is not a direct one.
        """

        @functools.cache
        def staging() -> DeviceStaging:
            if not hop.direct:
                raise UnsupportedError(f"{hop.label} passes through host slots, it stages nothing")
            if self._caches is None:
                raise UnsupportedError("the engine's KV caches are not registered")
            return self._make(self._caches, self._geometry, self._share)

        return staging

    def use_caches(self, caches: KVCaches) -> None:
        """The engine's caches are these from now on: staging that is made anew belongs to them."""
        self._caches = caches

    def attached(self, hop: Hop) -> None:
        """A hop has got its handler."""
        self._in_use = self._in_use or hop.direct

    def capture(self) -> ChecksumKind:
        """Which checksum to take of blocks captured from now on."""
        return ChecksumKind.WSUM if self._in_use else ChecksumKind.XXH3
