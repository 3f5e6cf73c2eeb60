"""Options of `prelude bench simulate`: the traffic, the objectives, the worker."""

from dataclasses import dataclass
from typing import Any

from bench.errors import OptionInvalid
from bench.simulator.curves import Curves, read_curves
from bench.simulator.outcome import Slo
from bench.simulator.run import Scenario, simulate
from bench.simulator.traffic import Traffic
from bench.systems.layout import Layout
from cluster.config.router import SloConfig

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    curves: str = "h200-llama-3.1-8b"
    gpus: int = 8  # of each layout
    layouts: tuple[str, ...] = ()  # these instead of all with so many GPUs
    prompt_tokens: int = 2048
    output_tokens: int = 128
    length_cv: float = 0.5
    num_adapters: int = 2000
    zipf: float = 1.0
    base_share: float = 0.1  # of the requests, without an adapter
    host_adapters: int = 500
    seconds: float = 20.0  # of arrivals that count
    warm_up_s: float = 5.0
    ttft_ms: float = 1000.0
    tpot_ms: float = 30.0
    share: float = 0.99  # of the requests within both
    routers: int = 2
    seed: int = 1

    def check(self) -> None:
        """Raises OptionInvalid."""
        limits = {
            "gpus": (self.gpus, 2, 1000),
            "prompt-tokens": (self.prompt_tokens, 1, 1e6),
            "output-tokens": (self.output_tokens, 1, 1e6),
            "length-cv": (self.length_cv, 0, 10),
            "adapters": (self.num_adapters, 0, 1e7),
            "zipf": (self.zipf, 0, 10),
            "base-share": (self.base_share, 0, 1),
            "host-adapters": (self.host_adapters, 1, 1e6),
            "seconds": (self.seconds, 0.1, 1e5),
            "ttft": (self.ttft_ms, 0.1, 1e7),
            "tpot": (self.tpot_ms, 0.1, 1e6),
            "share": (self.share, 0.01, 1),
            "routers": (self.routers, 1, 64),
        }
        for name, (value, least, most) in limits.items():
            if not least <= value <= most:
                raise OptionInvalid(f"--{name} {value:g}: from {least:g} to {most:g}")

    @property
    def worker(self) -> Curves:
        """Raises OptionInvalid."""
        return read_curves(self.curves)

    def scenario(self, layout: Layout, requests_per_s: float) -> Scenario:
        traffic = Traffic(
            requests_per_s,
            self.warm_up_s + self.seconds,
            self.num_adapters,
            self.zipf,
            self.base_share,
            self.prompt_tokens,
            self.output_tokens,
            self.length_cv,
        )
        slo = SloConfig(first_token_s=self.ttft_ms / 1000, event_gap_s=self.tpot_ms / 1000)
        return Scenario(self.worker, layout, traffic, self.host_adapters, self.routers, slo=slo)

    def measure(self, layout: Layout, requests_per_s: float) -> Row:
        """The figures of the requests after the warm-up."""
        outcome = simulate(self.scenario(layout, requests_per_s), self.seed)
        return {
            **outcome.summary(Slo(self.ttft_ms / 1000, self.tpot_ms / 1000), self.warm_up_s),
            "cold_loads": outcome.num_loads,
            "busy": {name: share for name, share in outcome.busy.items() if share},
        }
