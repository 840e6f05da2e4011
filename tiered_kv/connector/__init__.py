"""The connector's two halves: the manager decides, the workers move."""

from tiered_kv.connector.adapters import UNNAMED, Adapter, Adapters, Inquiry, Naming
from tiered_kv.connector.books import ManagerLimits
from tiered_kv.connector.border import Border, guarded
from tiered_kv.connector.handshake import Handshake
from tiered_kv.connector.live import Answering, LiveView, ask_all
from tiered_kv.connector.loading import LoadPlan, failing_plan
from tiered_kv.connector.manager import Manager
from tiered_kv.connector.messages import (
    ConnectorMetadata,
    FailedBlock,
    Orders,
    WorkerReport,
)
from tiered_kv.connector.plan import WorkerPlan
from tiered_kv.connector.prefill import PrefillRate, StepTimer, TimedStep
from tiered_kv.connector.requests import Answer, allowed_tiers
from tiered_kv.connector.storing import StorePlan
from tiered_kv.connector.views import KeyMirror, TierView
from tiered_kv.connector.worker import WorkerConnector

__all__ = [
    "UNNAMED",
    "Adapter",
    "Adapters",
    "Answer",
    "Answering",
    "Border",
    "ConnectorMetadata",
    "FailedBlock",
    "Handshake",
    "Inquiry",
    "KeyMirror",
    "LiveView",
    "LoadPlan",
    "Manager",
    "ManagerLimits",
    "Naming",
    "Orders",
    "PrefillRate",
    "StepTimer",
    "StorePlan",
    "TierView",
    "TimedStep",
    "WorkerConnector",
    "WorkerPlan",
    "WorkerReport",
    "allowed_tiers",
    "ask_all",
    "failing_plan",
    "guarded",
]
