"""The connector's two halves: the manager decides, the workers move."""

from tiered_kv.connector.adapters import UNNAMED, Adapter, Adapters, Inquiry, Naming
from tiered_kv.connector.books import ManagerLimits
from tiered_kv.connector.border import Border, guarded
from tiered_kv.connector.chunking import auto_chunk
from tiered_kv.connector.handshake import Handshake
from tiered_kv.connector.live import Answering, LiveCache, LiveView, ask_all
from tiered_kv.connector.loading import LoadPlan, failing_plan
from tiered_kv.connector.lookups import NOTHING_FOUND
from tiered_kv.connector.manager import Manager
from tiered_kv.connector.messages import (
    ConnectorMetadata,
    FailedBlock,
    Orders,
    WorkerReport,
)
from tiered_kv.connector.plan import WorkerPlan
from tiered_kv.connector.prefill import PrefillRate, StepTimer, TimedStep
from tiered_kv.connector.recording import (
    ENGINE_HITS,
    TRACE_FORMAT,
    TRACE_VERSION,
    TraceRecorder,
    trace_files,
)
from tiered_kv.connector.requests import USUAL, Answer, Care, allowed_tiers, care_for
from tiered_kv.connector.storing import StorePlan
from tiered_kv.connector.views import KeyMirror, TierView
from tiered_kv.connector.worker import WorkerConnector

__all__ = [
    "ENGINE_HITS",
    "NOTHING_FOUND",
    "TRACE_FORMAT",
    "TRACE_VERSION",
    "UNNAMED",
    "USUAL",
    "Adapter",
    "Adapters",
    "Answer",
    "Answering",
    "Border",
    "Care",
    "ConnectorMetadata",
    "FailedBlock",
    "Handshake",
    "Inquiry",
    "KeyMirror",
    "LiveCache",
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
    "TraceRecorder",
    "WorkerConnector",
    "WorkerPlan",
    "WorkerReport",
    "allowed_tiers",
    "ask_all",
    "auto_chunk",
    "care_for",
    "failing_plan",
    "guarded",
    "trace_files",
]
