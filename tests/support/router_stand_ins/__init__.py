"""Stand-ins for an engine's HTTP API and a worker's control service, over real sockets.

They imitate the behaviour of SGLang as observed, to test how the router handles failures of workers. They prove
nothing about SGLang, KV or adapters: tests/engine and tests/cluster do.
"""

from support.router_stand_ins.adapters import (
    BASE,
    DIRECTORIES,
    EVERYWHERE_ID,
    FINGERPRINT,
    LIMITS,
    MODEL,
    REVISION_ID,
    TEMPLATE,
    VOCABULARY,
    configured,
    library_over,
    managed_adapters,
    open_catalog,
)
from support.router_stand_ins.cluster import ClusterStandIn, eventually, repository_root, running_cluster
from support.router_stand_ins.engine import (
    WORDS,
    Behaviour,
    EngineStandIn,
    after,
    answers,
    breaks_after,
    drops,
    event_gap_timeout_s,
    hangs,
    stops_after,
    streams,
    usage,
)
from support.router_stand_ins.worker import WorkerStandIn

__all__ = [
    "BASE",
    "DIRECTORIES",
    "EVERYWHERE_ID",
    "FINGERPRINT",
    "LIMITS",
    "MODEL",
    "REVISION_ID",
    "TEMPLATE",
    "VOCABULARY",
    "WORDS",
    "Behaviour",
    "ClusterStandIn",
    "EngineStandIn",
    "WorkerStandIn",
    "after",
    "answers",
    "breaks_after",
    "configured",
    "drops",
    "event_gap_timeout_s",
    "eventually",
    "hangs",
    "library_over",
    "managed_adapters",
    "open_catalog",
    "repository_root",
    "running_cluster",
    "stops_after",
    "streams",
    "usage",
]
