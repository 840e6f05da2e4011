"""Which block lies where in host memory, which is worth storing, which one goes, and what of a
prefix is worth loading."""

from tiered_kv.placement.admission import Admission, required_uses
from tiered_kv.placement.catalog import Allocation, CatalogCounts, HostCatalog, SlotState
from tiered_kv.placement.gate import Cut, CutReason, GroupPrefix, TierLoad, choose_cut
from tiered_kv.placement.lru import LruPolicy

__all__ = [
    "Admission",
    "Allocation",
    "CatalogCounts",
    "Cut",
    "CutReason",
    "GroupPrefix",
    "HostCatalog",
    "LruPolicy",
    "SlotState",
    "TierLoad",
    "choose_cut",
    "required_uses",
]
