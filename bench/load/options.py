"""The options of a load. Passed to each process of the generator as JSON."""

from collections.abc import Iterator

import msgspec

from bench.errors import OptionInvalid
from bench.workloads.draws import Draws
from bench.workloads.lengths import PhasedLengths
from bench.workloads.workload import Stream, Workload

ADAPTER_FIELDS = ("adapter", "model", "lora_path", "none")  # none: it is left out


class Prefill(msgspec.Struct, frozen=True):
    """The engine that reads the prompts of a decode engine's requests."""

    url: str
    kv_host: str
    kv_port: int  # of its bootstrap server


class Engine(msgspec.Struct, frozen=True):
    """One of several engines that the generator calls itself, as a router would."""

    url: str
    prefill: Prefill | None = None  # with it, `url` is the decode engine's
    decode_has_adapters: bool = False  # as stock SGLang's, which applies them to every token


class Endpoint(msgspec.Struct, frozen=True):
    """What is called, and how an adapter is named there."""

    url: str  # without a path
    model: str
    adapters: tuple[str, ...] = ()  # names by number
    adapter_field: str = "adapter"  # one of ADAPTER_FIELDS
    headers: dict[str, str] = {}
    extra_body: dict[str, object] = {}
    timeout_s: float = 300.0
    ignore_eos: bool = True  # generate exactly as many tokens as asked for
    engines: tuple[Engine, ...] = ()  # sessions take turns; empty: one server at `url`
    takes_served: bool = False  # as many adapters as `adapters` are, of those that the server lists

    def engine_of(self, session: int) -> Engine:
        """Whom a session's requests go to."""
        return self.engines[session % len(self.engines)] if self.engines else Engine(self.url)


class Load(msgspec.Struct, frozen=True):
    """One load on one endpoint."""

    endpoint: Endpoint
    workload: Workload
    seed: int = 1
    num_requests: int | None = None
    duration_s: float | None = None  # after which no session starts
    requests_per_s: float | None = None  # None: closed loop
    concurrency: int | None = None  # of a closed loop
    processes: int = 1  # 0: not yet known

    def __post_init__(self) -> None:
        """Raises BenchError."""
        if self.requests_per_s is not None and not 0 < self.requests_per_s < 1e6:
            raise OptionInvalid(f"--rate {self.requests_per_s:g}: it must be above 0 and below a million")
        if self.concurrency is not None and self.processes > self.concurrency:
            raise OptionInvalid(f"--processes {self.processes}: at most --concurrency, which is {self.concurrency}")

    @property
    def is_open(self) -> bool:
        return self.requests_per_s is not None

    def stream(self) -> Stream:
        """Its sessions. Raises BenchError."""
        return Stream(self.workload, self.seed, len(self.endpoint.adapters))

    def due_s(self) -> Iterator[float]:
        """When each session of an open loop starts."""
        assert self.requests_per_s is not None
        if isinstance(self.workload.lengths, PhasedLengths):
            return self.workload.lengths.due_s(self.seed)
        sessions_per_s = self.requests_per_s / self.workload.turns
        return due_times(sessions_per_s, self.seed)


def due_times(per_s: float, seed: int) -> Iterator[float]:
    """When session 0, 1, 2, … is due, in seconds since the start: a Poisson process, without end."""
    draws, now_s = Draws(seed, "arrivals"), 0.0
    while True:
        now_s += draws.exponential(1 / per_s)
        yield now_s
