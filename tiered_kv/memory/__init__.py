"""The memory that a rank moves blocks through: its host block pool, the engine's KV caches, and
staging on the engine's device.

This is the lowest floor that handles tensors.
"""

from tiered_kv.memory.caches import CacheRef, KVCaches
from tiered_kv.memory.device import CudaDevice, Device, Lane, Mark, default_device, device_of
from tiered_kv.memory.layout import GroupLayout, PageSpan, layouts_of
from tiered_kv.memory.pages import PageState
from tiered_kv.memory.pool import HostBlockPool
from tiered_kv.memory.reference import DeviceCopy, random_caches
from tiered_kv.memory.rows import BlockIds, DeviceRows, HostRows, alike
from tiered_kv.memory.samples import read_block, write_block
from tiered_kv.memory.staging import HOST_STAGING_NAME, HostStaging, TorchStaging, make_staging

__all__ = [
    "HOST_STAGING_NAME",
    "BlockIds",
    "CacheRef",
    "CudaDevice",
    "Device",
    "DeviceCopy",
    "DeviceRows",
    "GroupLayout",
    "HostBlockPool",
    "HostRows",
    "HostStaging",
    "KVCaches",
    "Lane",
    "Mark",
    "PageSpan",
    "PageState",
    "TorchStaging",
    "alike",
    "default_device",
    "device_of",
    "layouts_of",
    "make_staging",
    "random_caches",
    "read_block",
    "write_block",
]
