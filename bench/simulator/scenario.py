"""A scenario: a cluster and its traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.errors import BenchError
from bench.simulator.adapter_memory import LoadModel
from bench.simulator.curves import Curves
from bench.simulator.traffic import ClosedLoop, Replay, Traffic
from router.placement.policy import PlacementConfig


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to keep to count as good."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05  # mean of the tokens after the first


@dataclass(frozen=True, slots=True)
class Pools:
    """Numbers of workers."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0

    def __post_init__(self) -> None:
        """Raises BenchError."""
        if bool(self.prefill) != bool(self.decode):
            raise BenchError(f"{self.prefill} prefill and {self.decode} decode workers: pairs need both")
        if not self.num_workers:
            raise BenchError("a cluster without workers serves nobody")

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    def roles(self) -> list[str]:
        return ["prefill"] * self.prefill + ["decode"] * self.decode + ["unified"] * self.unified

    def __str__(self) -> str:
        counts = {"prefill": self.prefill, "decode": self.decode, "unified": self.unified}
        return " + ".join(f"{number} {role}" for role, number in counts.items() if number)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation."""

    curves: Curves
    pools: Pools
    traffic: Traffic | Replay | ClosedLoop
    host_adapters: int = 250  # that fit in a worker's host memory
    num_routers: int = 1
    report_s: float = 0.2  # between two reports of an engine's load
    is_warm: bool = True  # memory begins with the most popular adapters at their homes
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    @property
    def loads(self) -> LoadModel:
        loads = self.curves.loads
        return LoadModel(
            self.host_adapters,
            loads.store_ms / 1000,
            loads.parallel,
            serial_s=loads.serial_ms / 1000,
        )
