"""`warm --keep` where a tier cannot keep blocks: told before the work, or beside what was done."""

from __future__ import annotations

from typing import cast

import pytest

from tests.unit.test_moving import GEOMETRY
from tiered_kv.cli.tending import StoreTier
from tiered_kv.cli.warm_keep import Keeping, keep_stored, kept_text, require_keeping
from tiered_kv.config import Deployment
from tiered_kv.contracts import StoreContext
from tiered_kv.errors import ConfigError
from tiered_kv.plugins import Plugins
from tiered_kv.testing.conformance.blocks import NAMESPACE, keys, put
from tiered_kv.testing.memory_tier import MemorySettings, MemoryStore, MemoryTiers

KEEPING = Keeping(60.0, 0.5)


class _Plugins:
    """Those of a deployment whose one backend keeps blocks in memory, none of them for a time."""

    def __init__(self) -> None:
        self.tiers = MemoryTiers()

    def usable(self, name: str) -> object:
        return self.tiers.backend


@pytest.fixture
def plugins() -> _Plugins:
    return _Plugins()


@pytest.fixture
def tier(plugins: _Plugins) -> StoreTier:
    settings = MemorySettings(name="far")
    return StoreTier(settings, Deployment(tiers=(settings,)), cast(Plugins, plugins))


def test_it_is_told_before_the_work(tier: StoreTier, plugins: _Plugins) -> None:
    require_keeping([tier])  # which holds nothing, and so does not tell
    fill(plugins)
    with pytest.raises(
        ConfigError, match=r"type memory \(tier 'far'\) cannot keep blocks; leave it"
    ):
        require_keeping([tier])


def test_it_is_told_with_what_was_done(tier: StoreTier, plugins: _Plugins) -> None:
    kept = keep_stored([tier], NAMESPACE.id, keys(range(3)), KEEPING)["far"]
    assert (kept.blocks, kept.asked) == (0, 3)
    assert kept_text(kept) == "no blocks kept: tier 'far' holds none of them"
    fill(plugins)
    kept = keep_stored([tier], NAMESPACE.id, keys(range(3)), KEEPING)["far"]
    assert (kept.blocks, kept.asked) == (0, 3)
    assert "cannot keep blocks" in kept_text(kept)


def fill(plugins: _Plugins) -> None:
    context = StoreContext("far", MemorySettings(name="far"), NAMESPACE, GEOMETRY)
    store = MemoryStore(plugins.tiers.disk("far"), context)
    put(store, range(3))
    store.close()
