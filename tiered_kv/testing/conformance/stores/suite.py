"""The store suite as one class."""

from __future__ import annotations

from tiered_kv.testing.conformance.stores.damage import DamageChecks
from tiered_kv.testing.conformance.stores.following import FollowingChecks
from tiered_kv.testing.conformance.stores.lasting import LastingChecks
from tiered_kv.testing.conformance.stores.maintaining import MaintenanceChecks
from tiered_kv.testing.conformance.stores.model import ModelChecks
from tiered_kv.testing.conformance.stores.publishing import PublishingChecks
from tiered_kv.testing.conformance.stores.reading import ReadingChecks
from tiered_kv.testing.conformance.stores.room import RoomChecks
from tiered_kv.testing.conformance.stores.sharing import SharingChecks
from tiered_kv.testing.conformance.stores.tight import TightChecks

__all__ = ["StoreConformance"]


class StoreConformance(
    ReadingChecks,
    PublishingChecks,
    FollowingChecks,
    RoomChecks,
    SharingChecks,
    LastingChecks,
    DamageChecks,
    MaintenanceChecks,
    ModelChecks,
    TightChecks,
):
    """All that every store owes. Subclass it in a test module as `Test...`, and give the fixture
    `case`; see `StoreCase`."""
