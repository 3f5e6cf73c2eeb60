"""A snapshot of all workers. Immutable except for residency, so one decision sees one state."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from router.fleet.worker_residency import WorkerResidency


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The last known state of one worker."""

    name: str
    role: str  # "prefill", "decode" or "unified"; from cluster.yaml until the first Describe
    is_connected: bool = False  # the last message of its agent is younger than three heartbeats
    is_late: bool = False  # not connected, but was placeable less than three heartbeats ago: expected back
    reason: str = "not reached yet"  # why it gets no requests, in words; may be empty
    # from Describe, once per connection
    engine_url: str = ""
    kv_host: str = ""
    kv_bootstrap_port: int = 0
    # from WatchState
    incarnation: str = ""  # of the engine; empty without one
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
        """True if a warm-up request has passed through these two incarnations of the engines."""
        return (decode.name, decode.incarnation) in self.warm_pairs

    @property
    def why_not_placeable(self) -> str:
        """The reason in words. Empty if it is placeable."""
        if self.is_placeable:
            return ""
        if self.is_connected and self.is_draining:
            return self.reason or "draining"
        return self.reason or "the worker says it is not ready"


@dataclass(frozen=True, slots=True)
class FleetState:
    """All workers, and the number of this router's engine calls in flight at each."""

    workers: Mapping[str, WorkerView]
    in_flight: Mapping[str, int]

    def with_late_workers(self, except_for: Set[str]) -> FleetState:
        """The state after a return of all late workers but `except_for`, unchanged since contact was lost."""
        workers = {
            name: replace(view, is_connected=True, is_ready=True) if view.is_late and name not in except_for else view
            for name, view in self.workers.items()
        }
        return FleetState(workers, self.in_flight)
