"""Which block lies where in host memory, which is worth storing, which one goes, and what of a
prefix is worth loading."""

from tiered_kv.placement.admission import Admission, required_uses
from tiered_kv.placement.catalog import HostCatalog
from tiered_kv.placement.gate import Cut, CutReason, GroupPrefix, TierLoad, choose_cut
from tiered_kv.placement.lru import LruPolicy
from tiered_kv.placement.policies import BUILT_IN, DEFAULT_POLICY, Policies
from tiered_kv.placement.replay import (
    Replay,
    ReplayTier,
    TierCounts,
    TracedRequest,
    tokens_by_source,
)
from tiered_kv.placement.scoring import AgedFrequency
from tiered_kv.placement.slots import Allocation, CatalogCounts, SlotState

__all__ = [
    "BUILT_IN",
    "DEFAULT_POLICY",
    "Admission",
    "AgedFrequency",
    "Allocation",
    "CatalogCounts",
    "Cut",
    "CutReason",
    "GroupPrefix",
    "HostCatalog",
    "LruPolicy",
    "Policies",
    "Replay",
    "ReplayTier",
    "SlotState",
    "TierCounts",
    "TierLoad",
    "TracedRequest",
    "choose_cut",
    "required_uses",
    "tokens_by_source",
]
