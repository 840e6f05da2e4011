"""The handler suites, one class per kind of pair."""

from __future__ import annotations

from tiered_kv.testing.conformance.handlers.engine_ends import (
    EngineDestinationChecks,
    EngineSourceChecks,
)
from tiered_kv.testing.conformance.handlers.interrupted import CommitChecks, InterruptionChecks
from tiered_kv.testing.conformance.handlers.moving import MovingChecks
from tiered_kv.testing.conformance.handlers.slot_ends import (
    SlotDestinationChecks,
    SlotSourceChecks,
)
from tiered_kv.testing.conformance.handlers.store_ends import (
    StoreDestinationChecks,
    StoreSourceChecks,
    TravellingChecks,
)

__all__ = [
    "CpuToGpuConformance",
    "CpuToStoreConformance",
    "GpuToCpuConformance",
    "GpuToStoreConformance",
    "HandlerConformance",
    "StoreToCpuConformance",
    "StoreToGpuConformance",
]


class HandlerConformance(MovingChecks, InterruptionChecks):
    """What every handler owes; the classes below add what the two ends ask for. Subclass one of
    them in a test module as `Test...`, and give the fixture `case`; see `HandlerCase`."""


class GpuToCpuConformance(HandlerConformance, EngineSourceChecks, SlotDestinationChecks):
    """From the engine's cache into host slots."""


class CpuToGpuConformance(HandlerConformance, SlotSourceChecks, EngineDestinationChecks):
    """From host slots into the engine's cache."""


class CpuToStoreConformance(
    HandlerConformance, SlotSourceChecks, StoreDestinationChecks, TravellingChecks, CommitChecks
):
    """From host slots into a store."""


class StoreToCpuConformance(
    HandlerConformance, StoreSourceChecks, SlotDestinationChecks, TravellingChecks
):
    """From a store into host slots."""


class GpuToStoreConformance(
    HandlerConformance, EngineSourceChecks, StoreDestinationChecks, CommitChecks
):
    """From the engine's cache into a store, directly."""


class StoreToGpuConformance(
    HandlerConformance, StoreSourceChecks, EngineDestinationChecks, CommitChecks
):
    """From a store into the engine's cache, directly."""
