"""The memory that a rank moves blocks through: its host block pool, and the engine's KV caches.

This is the lowest floor that handles tensors.
"""

from tiered_kv.memory.caches import CacheRef, KVCaches
from tiered_kv.memory.pool import HostBlockPool

__all__ = ["CacheRef", "HostBlockPool", "KVCaches"]
