"""The configuration of a deployment: one YAML file, read strictly."""

from tiered_kv.config.host_memory import MemoryRoom, host_memory
from tiered_kv.config.loading import TierTypes, deployment_model, load, schema
from tiered_kv.config.model import (
    Admit,
    CpuSettings,
    Deployment,
    Limits,
    NamespaceSettings,
    Placement,
    PolicySettings,
    Settings,
    StoreSettings,
    TierSettings,
)
from tiered_kv.config.room import Volume, require_room, shortages, volumes
from tiered_kv.config.shipped import shipped, shipped_names
from tiered_kv.config.units import (
    GIB,
    KIB,
    MIB,
    TIB,
    ByteRate,
    ByteSize,
    Directory,
    Duration,
    SizeOrPercent,
    format_bytes,
    format_seconds,
    readable_bytes,
)

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "TIB",
    "Admit",
    "ByteRate",
    "ByteSize",
    "CpuSettings",
    "Deployment",
    "Directory",
    "Duration",
    "Limits",
    "MemoryRoom",
    "NamespaceSettings",
    "Placement",
    "PolicySettings",
    "Settings",
    "SizeOrPercent",
    "StoreSettings",
    "TierSettings",
    "TierTypes",
    "Volume",
    "deployment_model",
    "format_bytes",
    "format_seconds",
    "host_memory",
    "load",
    "readable_bytes",
    "require_room",
    "schema",
    "shipped",
    "shipped_names",
    "shortages",
    "volumes",
]
