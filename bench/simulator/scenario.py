"""A scenario: a cluster and its traffic."""

from __future__ import annotations

from dataclasses import dataclass

from bench.simulator.curves import Curves
from bench.simulator.traffic import Traffic
from bench.systems.layout import Layout


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request has to keep to count as good."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05  # mean of the tokens after the first


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation."""

    curves: Curves
    layout: Layout
    traffic: Traffic
    host_adapters: int = 250  # that fit in a worker's host memory
    num_routers: int = 1
    report_s: float = 0.2  # between two reports of an engine's load
    is_warm: bool = True  # memory begins with the most popular adapters at their homes
