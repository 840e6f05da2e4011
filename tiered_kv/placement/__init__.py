"""Which block lies where in host memory, which is worth storing, and which one goes."""

from tiered_kv.placement.admission import Admission
from tiered_kv.placement.catalog import Allocation, CatalogCounts, HostCatalog, SlotState
from tiered_kv.placement.lru import LruPolicy

__all__ = ["Admission", "Allocation", "CatalogCounts", "HostCatalog", "LruPolicy", "SlotState"]
