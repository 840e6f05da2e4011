"""The connector's two halves: the manager decides, the workers move."""

from tiered_kv.connector.adapters import UNNAMED, Adapter, Adapters, Inquiry, Naming
from tiered_kv.connector.handshake import Handshake
from tiered_kv.connector.manager import Manager, ManagerLimits, StorePlan
from tiered_kv.connector.messages import (
    ConnectorMetadata,
    FailedBlock,
    WorkerReport,
)
from tiered_kv.connector.requests import Answer, allowed_tiers
from tiered_kv.connector.views import KeyMirror, TierView
from tiered_kv.connector.worker import WorkerConnector, WorkerPlan

__all__ = [
    "UNNAMED",
    "Adapter",
    "Adapters",
    "Answer",
    "ConnectorMetadata",
    "FailedBlock",
    "Handshake",
    "Inquiry",
    "KeyMirror",
    "Manager",
    "ManagerLimits",
    "Naming",
    "StorePlan",
    "TierView",
    "WorkerConnector",
    "WorkerPlan",
    "WorkerReport",
    "allowed_tiers",
]
