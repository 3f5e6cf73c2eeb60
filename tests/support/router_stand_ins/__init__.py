# ruff: noqa: F401, I001 - what tests import from here
"""Stand-ins for an engine's HTTP API and a worker's control service, over real sockets.

They imitate the behaviour of SGLang as observed, to test how the router handles failures of workers. They prove
nothing about SGLang, KV or adapters: tests/engine and tests/cluster do.
"""

from support.router_stand_ins.adapters import (
    BASE, DIRECTORIES, EVERYWHERE_ID, FINGERPRINT, LIMITS, MODEL, REVISION_ID, TEMPLATE, VOCABULARY, configured,
    library_over, managed_adapters,
)  # fmt: skip
from support.router_stand_ins.cluster import (
    ClusterStandIn, eventually, post_bytes, repository_root, running_cluster,
)  # fmt: skip
from support.router_stand_ins.engine import (
    MESSAGES, TEXT, WORDS, Behaviour, EngineStandIn, after, answers, breaks_after, drops, event_gap_timeout_s, hangs,
    in_one_write, stops_after, streams, usage,
)  # fmt: skip
from support.router_stand_ins.worker import WorkerStandIn
from support.waiting import until
