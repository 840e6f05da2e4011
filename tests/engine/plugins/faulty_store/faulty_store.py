"""A plug-in for tests: the tier type `faulty`, the real nvme store in which faults are injected."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from pydantic import Field

from tiered_kv.config import TierSettings
from tiered_kv.contracts import API_VERSION, Backend, BlockStore, StoreContext
from tiered_kv.engine import probing
from tiered_kv.specs import KeySpec
from tiered_kv.testing.faults import Faults, Injection, faulty_backend
from tiered_kv.values import Medium

if not os.environ.get("FAULTY_STORE_BACKGROUND_READS"):
    # Faults are counted by calls: no background read of a tier that works is to be among them.
    probing.ACTIVE_SECONDS = probing.AGAIN_SECONDS = 3600.0


class FaultySpec(KeySpec):
    """Blocks in a faulty store."""

    medium = Medium("faulty")


class FaultySettings(TierSettings, frozen=True):
    """The settings of the wrapped store, and where is said what goes wrong."""

    type: Literal["faulty"] = "faulty"
    path: str = Field(description="Directory of the wrapped store.")
    plan: str = Field(description="File with a `FaultPlan` as JSON, see `tiered_kv.testing.faults`")


def _nvme() -> Backend:
    [entry] = entry_points(group="tiered_kv.backends", name="nvme")
    loaded = entry.load()
    assert isinstance(loaded, Backend)
    return loaded


def _tell(injection: Injection) -> None:
    where = f"call {injection.call} of {injection.method}, blocks {list(injection.positions)}"
    print(f"faulty store: {injection.effect} at {where}", flush=True)


def _faults(context: StoreContext) -> Faults:
    return Faults(tier=context.tier, file=Path(context.settings.plan), told=_tell)


def open_store(context: StoreContext) -> BlockStore:
    """Open the real nvme store, with faults."""
    nvme = _nvme()
    assert nvme.settings is not None
    assert nvme.open_store is not None
    model, open_nvme = nvme.settings(), nvme.open_store

    def open_inner(outer: StoreContext) -> BlockStore:
        told = outer.settings
        wrapped = model(name=told.name, type="nvme", path=told.path, capacity=told.capacity)
        return open_nvme(replace(outer, settings=wrapped))

    faulty = faulty_backend(replace(nvme, open_store=open_inner), _faults)
    assert faulty.open_store is not None
    return faulty.open_store(context)


backend = Backend(
    name="faulty",
    medium=Medium("faulty"),
    api_version=API_VERSION,
    description="The nvme store, failing on request.",
    settings=lambda: FaultySettings,
    spec=FaultySpec,
    open_store=open_store,
)
