"""Planning: what a capacity and a policy would bring, from a trace of requests."""

from tiered_kv.planning.figures import RATED_YEARS, Drive, Figures, FirstToken
from tiered_kv.planning.grid import Cell, automatic_capacities
from tiered_kv.planning.models import KVShape, find_config, kv_shape
from tiered_kv.planning.page import page
from tiered_kv.planning.plan import Plan, Question, make_plan, plan_as_dict
from tiered_kv.planning.recommend import Recommendation, deployment_yaml, lifetime
from tiered_kv.planning.speeds import ASSUMED_PREFILL, Speeds, live_speeds, read_speeds
from tiered_kv.planning.traces import Trace, TraceKind, read_trace

__all__ = [
    "ASSUMED_PREFILL",
    "RATED_YEARS",
    "Cell",
    "Drive",
    "Figures",
    "FirstToken",
    "KVShape",
    "Plan",
    "Question",
    "Recommendation",
    "Speeds",
    "Trace",
    "TraceKind",
    "automatic_capacities",
    "deployment_yaml",
    "find_config",
    "kv_shape",
    "lifetime",
    "live_speeds",
    "make_plan",
    "page",
    "plan_as_dict",
    "read_speeds",
    "read_trace",
]
