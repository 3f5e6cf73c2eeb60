"""Options shared by all questions: the traffic, the objectives, the worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.errors import BenchError
from bench.simulator.curves import Curves, read_curves
from bench.simulator.outcome import Outcome
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools, Scenario, Slo
from bench.simulator.traffic import Traffic

Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """One run of `prelude bench simulate`."""

    curves: str = "h200-llama-3.1-8b"
    requests_per_s: float = 100.0
    gpus: int = 8  # where a question compares layouts of equal size
    prompt_tokens: int = 2048
    output_tokens: int = 128
    length_cv: float = 0.5
    num_adapters: int = 2000
    zipf: float = 1.0
    base_share: float = 0.1  # of the requests, without an adapter
    host_adapters: int = 500
    slots: int | None = None  # None: as the curves say
    seconds: float = 20.0  # of arrivals that count
    warm_up_s: float = 5.0
    ttft_ms: float = 1000.0
    tpot_ms: float = 30.0
    share: float = 0.99  # of the requests within both
    routers: int = 2
    seed: int = 1

    def check(self) -> None:
        """Raises BenchError."""
        limits = {
            "rate": (self.requests_per_s, 1e-3, 1e6),
            "gpus": (self.gpus, 2, 10_000),
            "prompt-tokens": (self.prompt_tokens, 1, 1e6),
            "output-tokens": (self.output_tokens, 1, 1e6),
            "length-cv": (self.length_cv, 0, 10),
            "adapters": (self.num_adapters, 0, 1e7),
            "zipf": (self.zipf, 0, 10),
            "base-share": (self.base_share, 0, 1),
            "host-adapters": (self.host_adapters, 1, 1e6),
            "slots": (self.slots or 1, 1, 1e5),
            "seconds": (self.seconds, 0.1, 1e5),
            "ttft": (self.ttft_ms, 0.1, 1e7),
            "tpot": (self.tpot_ms, 0.1, 1e6),
            "share": (self.share, 0.01, 1),
            "routers": (self.routers, 1, 64),
        }
        for name, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise BenchError(f"--{name} {value:g}: from {least:g} to {most:g}")

    @property
    def worker(self) -> Curves:
        """Raises BenchError."""
        found = read_curves(self.curves)
        if self.slots is None:
            return found
        return msgspec.structs.replace(found, limits=msgspec.structs.replace(found.limits, slots=self.slots))

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft_ms / 1000, self.tpot_ms / 1000)

    def traffic(self, requests_per_s: float | None = None) -> Traffic:
        return Traffic(
            requests_per_s or self.requests_per_s,
            self.warm_up_s + self.seconds,
            self.num_adapters,
            self.zipf,
            self.base_share,
            self.prompt_tokens,
            self.output_tokens,
            self.length_cv,
        )

    def scenario(self, pools: Pools, requests_per_s: float | None = None, **changes: Any) -> Scenario:
        given = {
            "curves": self.worker,
            "traffic": self.traffic(requests_per_s),
            "slo": self.slo,
            "host_adapters": self.host_adapters,
            "num_routers": self.routers,
            **changes,
        }
        return Scenario(pools=pools, **given)

    def figures(self, outcome: Outcome) -> Row:
        """Of the requests after the warm-up."""
        return {
            **outcome.summary(self.slo, self.warm_up_s),
            "cold_loads": outcome.num_loads,
            "busy": {name: share for name, share in outcome.busy.items() if share},
        }

    def measure(self, pools: Pools, requests_per_s: float | None = None) -> Row:
        return self.figures(simulate(self.scenario(pools, requests_per_s), self.seed))
