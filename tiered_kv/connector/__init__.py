"""The connector's two halves: the manager decides, the workers move."""

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
    "Answer",
    "ConnectorMetadata",
    "FailedBlock",
    "Handshake",
    "KeyMirror",
    "Manager",
    "ManagerLimits",
    "StorePlan",
    "TierView",
    "WorkerConnector",
    "WorkerPlan",
    "WorkerReport",
    "allowed_tiers",
]
