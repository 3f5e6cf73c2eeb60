"""What the router knows of its workers at one moment: immutable but for residency, so a decision has one picture."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from router.fleet.worker_residency import WorkerResidency


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker, as it last described itself."""

    name: str
    role: str  # "prefill", "decode" or "unified"; cluster.yaml's until the worker has described itself
    is_connected: bool = False  # its agent speaks to us, the last word is younger than three heartbeats
    is_late: bool = False  # not connected, but was placeable less than three heartbeats ago: expected back
    reason: str = "not reached yet"  # why it gets no requests, for people; empty when it may
    # from Describe, once per connection
    engine_url: str = ""
    kv_host: str = ""
    kv_bootstrap_port: int = 0
    # from WatchState
    incarnation: str = ""  # of the engine; empty while there is none
    is_engine_up: bool = False
    is_ready: bool = False
    is_draining: bool = False
    warm_pairs: frozenset[tuple[str, str]] = frozenset()  # (decode name, its incarnation); prefill only
    residency: WorkerResidency = field(default_factory=WorkerResidency, compare=False)  # shared and mutable; see there
    num_residency_changes: int = 0  # since the router started
    # The load is not compared: views that differ in it alone can serve the same requests.
    num_running: int = field(default=0, compare=False)
    num_queued: int = field(default=0, compare=False)
    used_kv_tokens: int = field(default=0, compare=False)
    max_kv_tokens: int = field(default=0, compare=False)

    @property
    def is_placeable(self) -> bool:
        return self.is_connected and self.is_engine_up and self.is_ready and not self.is_draining

    def is_warm_with(self, decode: WorkerView) -> bool:
        """KV has crossed between these two engines, both as they run now."""
        return (decode.name, decode.incarnation) in self.warm_pairs

    @property
    def why_not_placeable(self) -> str:
        """For people. Empty when it is placeable."""
        if self.is_placeable:
            return ""
        if self.is_connected and self.is_draining:
            return self.reason or "draining"
        return self.reason or "the worker says it is not ready"


@dataclass(frozen=True, slots=True)
class FleetState:
    """All workers of the cluster, and how many of this router's requests each has."""

    workers: Mapping[str, WorkerView]
    in_flight: Mapping[str, int]

    def with_late_workers(self, except_for: Set[str]) -> FleetState:
        """The state as it will be if the late workers, `except_for` some, come back as they were."""
        workers = {
            name: replace(view, is_connected=True, is_ready=True) if view.is_late and name not in except_for else view
            for name, view in self.workers.items()
        }
        return FleetState(workers, self.in_flight)
