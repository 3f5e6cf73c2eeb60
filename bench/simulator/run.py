"""Runs a scenario: requests arrive, are placed, wait for adapters, are read and answered."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from bench.simulator.adapter_memory import AdapterMemory
from bench.simulator.attempt import Attempt
from bench.simulator.clock import Clock
from bench.simulator.curves import Curves, EngineTimes
from bench.simulator.engine import Engine
from bench.simulator.outcome import Outcome
from bench.simulator.traffic import Arrival, Traffic
from bench.systems.layout import Layout
from cluster.config.router import SloConfig
from router.fleet.fleet_state import FleetState, Holders, WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.placement.placer import Placer
from router.placement.policy import HOME_SHARE, MAX_ADAPTER_HOMES
from router.placement.request import FailedAttempts, PlacementRequest, PromptSize

_INCARNATION = "1"  # of every engine
_NO_FAILURE = FailedAttempts()
_REPORT_S = 0.2  # between two reports of an engine's load


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster and its traffic."""

    curves: Curves
    layout: Layout
    traffic: Traffic
    host_adapters: int = 250  # that fit in a worker's host memory
    num_routers: int = 1
    is_warm: bool = True  # memory begins with the most popular adapters at their homes
    slo: SloConfig = field(default_factory=SloConfig)


def simulate(scenario: Scenario, seed: int = 1) -> Outcome:
    """Run a scenario until the last of its requests has ended. Equal seeds give equal outcomes."""
    return Run(scenario, seed).run()


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """Prefill, decode or unified."""

    name: str
    role: str
    engine: Engine
    memory: AdapterMemory

    def view(self, decodes: Iterable[str]) -> WorkerView:
        """As routers see it, beside these decode workers."""
        return WorkerView(
            self.name,
            self.role,
            incarnation=_INCARNATION,
            is_connected=True,
            is_engine_up=True,
            is_ready=True,
            warm_pairs=frozenset((each, _INCARNATION) for each in decodes if self.role == "prefill"),
            residency=self.memory.residency,
        )


class Router:
    """The real placement over the real bookkeeping. It counts its own requests, and hears of others from workers."""

    def __init__(
        self, clock: Clock, random: Random, holders: Holders, views: Mapping[str, WorkerView], slo: SloConfig
    ) -> None:
        self.loads = WorkerLoads(clock)
        self.placer = Placer(self.loads, clock=clock, random=random, slo=slo)
        self.state = FleetState(views, self.loads, holders)


class Run:
    """One simulation. Its parts may be looked at afterwards."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.clock, self.outcome = scenario, Clock(), Outcome()
        self._seed = seed
        self._times = EngineTimes(scenario.curves)
        self._chunk_s = self._times.batch_s(scenario.curves.limits.chunk_tokens, 1, 0, 1.0)
        roles, holders = scenario.layout.roles, Holders()
        digits = len(str(len(roles)))
        names = [f"{role}-{number:0{digits}}" for number, role in enumerate(roles)]
        self.workers: dict[str, Worker] = {}
        for name, role in zip(names, roles, strict=True):
            memory = AdapterMemory(scenario.curves.loads, scenario.host_adapters, self.clock, holders, self._resident)
            engine = Engine(self._times, self.clock, self._read, self._first, self._ended)
            self.workers[name] = Worker(name, role, engine, memory)
        decodes = [name for name, worker in self.workers.items() if worker.role == "decode"]
        views = {name: worker.view(decodes) for name, worker in self.workers.items()}
        self.routers = [
            Router(self.clock, Random(seed + 1000 * (number + 1)), holders, views, scenario.slo)
            for number in range(scenario.num_routers)
        ]
        self._num_open = 0
        self._num_created = 0
        self._has_arrivals = True

    def run(self) -> Outcome:
        if self.scenario.is_warm:
            self._fill()
        self._report()
        for arrival in self.scenario.traffic.arrivals(self._seed):
            self.clock.run_until(arrival.at_s)
            self._arrive(arrival)
        self._has_arrivals = False
        self.clock.run_out()
        return self._finished()

    # ---- a request's way --------------------------------------------------------------------------------------------

    def _arrive(self, arrival: Arrival) -> None:
        number = self._num_created
        self._num_created += 1
        self._num_open += 1
        prompt, output = arrival.prompt_tokens, arrival.output_tokens
        revision_id = None if arrival.adapter is None else revision_of(arrival.adapter)
        asked = PlacementRequest(revision_id, size=PromptSize(prompt, prompt + output))
        router = self._router(number)
        asked = router.placer.observe(asked)
        placement = router.placer.place(asked, router.state, _NO_FAILURE)
        assert placement is not None, "every worker is ready"
        placed = router.placer.take(asked, placement)
        reader, generator = self.workers[placement.prefill.name], self.workers[placement.decode.name]
        attempt = Attempt(number, self.clock.now, revision_id, prompt, output, placed, reader, generator, prompt)
        if revision_id is None:
            self._resident(attempt)
        else:
            attempt.was_cold = not reader.memory.ensure(revision_id, attempt)

    def _router(self, number: int) -> Router:
        return self.routers[number % len(self.routers)]

    def _resident(self, attempt: Attempt) -> None:
        waited_s = self.clock.now - attempt.at_s
        if waited_s:
            self._router(attempt.number).placer.loaded(attempt.placed, waited_s)
        attempt.placed.in_flight[0].read_begins()
        for engine in {attempt.reader.engine, attempt.generator.engine}:
            engine.num_awaiting_room += 1
        attempt.generator.engine.admit(attempt, self._admitted)

    def _admitted(self, attempt: Attempt) -> None:
        for engine in {attempt.reader.engine, attempt.generator.engine}:
            engine.num_awaiting_room -= 1
        attempt.reader.engine.num_unread += 1
        attempt.reader.engine.read(attempt)

    def _read(self, attempt: Attempt) -> None:
        attempt.reader.engine.num_unread -= 1
        attempt.placed.in_flight[0].read_ended()
        generate = attempt.generator.engine.generate
        if attempt.reader.engine is not attempt.generator.engine:
            self.clock.after(self._times.transfer_s(attempt.prompt_tokens), generate, attempt)
        else:
            generate(attempt)

    def _first(self, attempt: Attempt) -> None:
        attempt.first_s = self.clock.now + self._times.answer_s

    def _ended(self, attempt: Attempt) -> None:
        attempt.generator.engine.release(attempt)
        attempt.placed.release()
        self._router(attempt.number).placer.answered(attempt.output_tokens)
        self._num_open -= 1
        outcome, end_s, tokens = self.outcome, self.clock.now + self._times.answer_s, attempt.output_tokens - 1
        outcome.at_s.append(attempt.at_s)
        outcome.ttft_s.append(attempt.first_s - attempt.at_s)
        outcome.end_s.append(end_s)
        outcome.tpot_s.append((end_s - attempt.first_s) / tokens if tokens else math.nan)
        outcome.was_cold.append(attempt.was_cold)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """What every engine's agent says of its KV memory and its queues, until all is served."""
        max_kv_tokens = self.scenario.curves.limits.max_kv_tokens
        for worker in self.workers.values():
            queues = worker.engine.queues(worker.role)
            for router in self.routers:
                router.loads[worker.name].report(
                    router.loads.clock(),
                    used_kv_tokens=worker.engine.used_kv_tokens,
                    max_kv_tokens=max_kv_tokens if worker.role != "prefill" else 0,
                    queues=queues,
                    num_routers=len(self.routers),
                    num_unread=queues.num_unread(worker.role),
                    spent=worker.engine.spent,
                )
        if self._has_arrivals or self._num_open:
            self.clock.after(_REPORT_S, self._report)

    def _fill(self) -> None:
        """The most popular adapters are at their homes that have room, as many as demand asks for.

        Routers have seen them being loaded: they know how long that takes.
        """
        for router in self.routers:
            router.placer.policy.load_s["store"] = self.scenario.curves.loads.store_ms / 1000
        traffic, room = self.scenario.traffic, self.scenario.host_adapters
        readers, homes = self.routers[0].state.readers, self.routers[0].state.homes
        chosen: list[list[str]] = [[] for _ in readers]
        num_left = room * len(readers)
        for adapter in range(min(traffic.num_adapters, num_left)):
            revision_id = revision_of(adapter)
            with_room = (i for i in homes.order(revision_id) if len(chosen[i]) < room)
            for index in islice(with_room, self._wanted_copies(adapter)):
                chosen[index].append(revision_id)
        for view, revision_ids in zip(readers, chosen, strict=True):
            self.workers[view.name].memory.fill(reversed(revision_ids))

    def _wanted_copies(self, adapter: int) -> int:
        """One, and one more for each `HOME_SHARE` of a worker's time, as placement has it."""
        traffic = self.scenario.traffic
        read_s = traffic.prompt_tokens / self.scenario.curves.limits.chunk_tokens * self._chunk_s
        demand = traffic.share_of(adapter) * traffic.requests_per_s * read_s
        return min(MAX_ADAPTER_HOMES, 1 + int(demand / HOME_SHARE))

    def _finished(self) -> Outcome:
        outcome, now = self.outcome, max(self.clock.now, 1e-9)
        outcome.num_loads = sum(worker.memory.num_loads for worker in self.workers.values())
        for role in sorted({worker.role for worker in self.workers.values()}):
            engines = [worker.engine for worker in self.workers.values() if worker.role == role]
            outcome.busy[f"{role}_reading"] = round(sum(each.reading_s for each in engines) / len(engines) / now, 4)
            outcome.busy[f"{role}_generating"] = round(
                sum(each.decode.busy_s for each in engines) / len(engines) / now, 4
            )
        return outcome


def revision_of(adapter: int) -> str:
    """An id as long as real ones."""
    return f"sha256:{adapter:064x}"
