"""A scenario: a cluster, its traffic, and its failures."""

from __future__ import annotations

from dataclasses import dataclass

from bench.errors import BenchError
from bench.simulator.adapter_memory import LoadModel
from bench.simulator.curves import Curves
from bench.simulator.traffic import ClosedLoop, Replay, Traffic


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to keep to count as good."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05  # mean of the tokens after the first


@dataclass(frozen=True, slots=True)
class Pools:
    """Numbers of workers. Racks take them in turn, so each has its share of every role."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0
    racks: int = 1

    def __post_init__(self) -> None:
        """Raises BenchError."""
        if bool(self.prefill) != bool(self.decode):
            raise BenchError(f"{self.prefill} prefill and {self.decode} decode workers: pairs need both")
        if not self.num_workers:
            raise BenchError("a cluster without workers serves nobody")
        if not 1 <= self.racks <= self.num_workers:
            raise BenchError(f"{self.racks} racks for {self.num_workers} workers: 1 to {self.num_workers} are possible")

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["unified"] * self.unified

    def __str__(self) -> str:
        counts = {"prefill": self.prefill, "decode": self.decode, "unified": self.unified}
        return " + ".join(f"{number} {role}" for role, number in counts.items() if number)


@dataclass(frozen=True, slots=True)
class Loss:
    """Workers end, all of a rack or those named."""

    at_s: float
    rack: str = ""
    workers: tuple[str, ...] = ()
    is_silent: bool = False  # power or network: routers notice it by missing heartbeats; else connections are reset
    back_after_s: float | None = None  # with empty memory; None: never


@dataclass(frozen=True, slots=True)
class RoleChanges:
    """Prefill and decode workers change roles by the routers' metrics for autoscalers (docs/placement.md)."""

    period_s: float = 5.0  # between two looks at the metrics
    change_s: float = 30.0  # from an idle engine to one of the other role
    drain_s: float = 30.0  # longest wait for its requests; what is left is then tried elsewhere, or cut
    high_queue_s: float = 1.0  # prompts wait longer: one more prefill worker, if decode workers have room
    low_load: float = 0.35
    high_load: float = 0.7  # decode workers are full: one more, if prompts do not wait so long


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation."""

    curves: Curves
    pools: Pools
    traffic: Traffic | Replay | ClosedLoop
    slo: Slo = Slo()
    host_adapters: int = 250  # that fit in a worker's host memory
    losses: tuple[Loss, ...] = ()
    role_changes: RoleChanges | None = None
    num_routers: int = 1
    max_attempts: int = 3  # as `router.max_attempts`
    detect_s: float = 6.0  # of a silent loss: three heartbeats
    connect_timeout_s: float = 5.0
    report_s: float = 0.2  # between two reports of an engine's load
    warm_up_s: float = 0.0  # arrivals before this are in no figure
    is_warm: bool = True  # memory begins with the most popular adapters at their homes

    @property
    def loads(self) -> LoadModel:
        loads = self.curves.loads
        return LoadModel(
            self.host_adapters,
            loads.store_ms / 1000,
            loads.parallel,
            serial_s=loads.serial_ms / 1000,
        )
