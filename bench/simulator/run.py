"""Runs a scenario: requests arrive, are placed, wait for adapters, are read and answered."""

from __future__ import annotations

import math
from itertools import islice
from random import Random

from bench.simulator.adapter_memory import AdapterMemory
from bench.simulator.attempt import Attempt, SimulatedRequest
from bench.simulator.clock import Clock
from bench.simulator.curves import EngineTimes
from bench.simulator.engine import Engine
from bench.simulator.outcome import Outcome
from bench.simulator.routers import Router, views_of
from bench.simulator.scenario import Scenario
from bench.simulator.traffic import Arrival, ClosedLoop, Traffic
from bench.simulator.worker import Worker
from router.fleet.fleet_state import Holders
from router.placement.request import PlacementRequest, PromptSize


def simulate(scenario: Scenario, seed: int = 1) -> Outcome:
    """Run a scenario until the last of its requests has ended. Equal seeds give equal outcomes."""
    return Run(scenario, seed).run()


class Run:
    """One simulation. Its parts may be looked at afterwards."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.clock, self.outcome = scenario, Clock(), Outcome()
        self._seed = seed
        self._times = EngineTimes(scenario.curves)
        self._chunk_s = self._times.batch_s(scenario.curves.limits.chunk_tokens, 1, 0, 1.0)
        holders, roles = Holders(), scenario.pools.roles()
        digits = len(str(len(roles)))
        self.workers: dict[str, Worker] = {}
        for number, role in enumerate(roles):
            name = f"{role}-{number:0{digits}}"
            memory = AdapterMemory(scenario.loads, self.clock, holders, self._resident)
            engine = Engine(self._times, self.clock, self._read, self._first, self._ended)
            self.workers[name] = Worker(name, role, memory, engine)
        views = views_of(self.workers.values())
        self.routers = [
            Router(self.clock, Random(seed + 1000 * (number + 1)), scenario.placement, holders, views)
            for number in range(scenario.num_routers)
        ]
        self._num_open = 0
        self._num_created = 0
        self._has_arrivals = True

    def run(self) -> Outcome:
        scenario, clock = self.scenario, self.clock
        if scenario.is_warm:
            self._fill()
        self._report()
        if isinstance(scenario.traffic, ClosedLoop):
            for _ in range(min(scenario.traffic.concurrency, scenario.traffic.num_requests)):
                self._next_of_closed_loop()
        else:
            for arrival in scenario.traffic.arrivals(self._seed):
                clock.run_until(arrival.at_s)
                self._arrive(arrival)
        self._has_arrivals = False
        clock.run_out()
        return self._finished()

    # ---- a request's way --------------------------------------------------------------------------------------------

    def _next_of_closed_loop(self) -> None:
        traffic = self.scenario.traffic
        assert isinstance(traffic, ClosedLoop)
        if self._num_created < traffic.num_requests:
            self._arrive(traffic.arrival(self._num_created, self.clock.now))

    def _arrive(self, arrival: Arrival) -> None:
        number = self._num_created
        self._num_created += 1
        self._num_open += 1
        prompt, output = arrival.prompt_tokens, arrival.output_tokens
        revision_id = None if arrival.adapter is None else revision_of(arrival.adapter)
        asked = PlacementRequest(revision_id, size=PromptSize(prompt, prompt + output))
        asked = self._router(number).placer.observe(asked)
        self._place(SimulatedRequest(number, self.clock.now, asked, prompt, output))

    def _router(self, number: int) -> Router:
        return self.routers[number % len(self.routers)]

    def _place(self, request: SimulatedRequest) -> None:
        router = self._router(request.number)
        placement = router.place(request)
        placed = router.placer.take(request.placement_request, placement)
        reader, generator = self.workers[placement.prefill.name], self.workers[placement.decode.name]
        attempt = Attempt(request, placed, reader, generator, request.prompt_tokens, self.clock.now)
        revision_id = request.placement_request.revision_id
        if revision_id is None:
            self._resident(attempt)
        elif not reader.memory.ensure(revision_id, attempt):
            request.was_cold = True

    def _resident(self, attempt: Attempt) -> None:
        waited_s = self.clock.now - attempt.placed_s
        if waited_s:
            self._router(attempt.request.number).placer.loaded(attempt.placed, waited_s)
        attempt.placed.in_flight[0].read_begins()
        self._count(attempt, awaits_room=True)
        attempt.generator.engine.admit(attempt, self._admitted)

    def _admitted(self, attempt: Attempt) -> None:
        self._count(attempt, is_unread=True)
        attempt.reader.engine.read(attempt)

    def _read(self, attempt: Attempt) -> None:
        self._count(attempt)
        attempt.placed.in_flight[0].read_ended()
        if attempt.is_pair:
            transfer_s = self._times.transfer_s(attempt.request.prompt_tokens)
            self.clock.after(transfer_s, attempt.generator.engine.generate, attempt)
        else:
            attempt.generator.engine.generate(attempt)

    def _first(self, attempt: Attempt) -> None:
        attempt.request.first_s = self.clock.now + self._times.answer_s

    def _ended(self, attempt: Attempt) -> None:
        attempt.generator.engine.release(attempt)
        attempt.placed.release()
        request, outcome = attempt.request, self.outcome
        request.end_s = self.clock.now + self._times.answer_s
        self._num_open -= 1
        outcome.at_s.append(request.at_s)
        outcome.ttft_s.append(request.first_s - request.at_s)
        outcome.end_s.append(request.end_s)
        tokens = request.output_tokens - 1
        outcome.tpot_s.append((request.end_s - request.first_s) / tokens if tokens else math.nan)
        outcome.was_cold.append(request.was_cold)
        if isinstance(self.scenario.traffic, ClosedLoop):
            self.clock.after(0.0, self._next_of_closed_loop)

    def _count(self, attempt: Attempt, *, awaits_room: bool = False, is_unread: bool = False) -> None:
        """Keep what its engines report right: what it waits for now, if it does."""
        for worker in {attempt.reader, attempt.generator}:
            worker.engine.num_awaiting_room += awaits_room - attempt.awaits_room
        attempt.reader.engine.num_unread += is_unread - attempt.is_unread
        attempt.awaits_room, attempt.is_unread = awaits_room, is_unread

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """What every engine's agent says of its KV memory and its queues."""
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
                )
        if not self._has_arrivals and self._num_open and not self.clock.num_pending:
            raise RuntimeError(f"{self._num_open} requests wait for an event that never comes")
        if self._has_arrivals or self._num_open:
            self.clock.after(self.scenario.report_s, self._report)

    def _fill(self) -> None:
        """The most popular adapters are at their homes that have room, as many as demand asks for."""
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
        """One, and one more for each `home_share` of a worker's time, as placement has it."""
        traffic, placement = self.scenario.traffic, self.scenario.placement
        if not isinstance(traffic, Traffic):
            return 1
        read_s = traffic.prompt_tokens / self.scenario.curves.limits.chunk_tokens * self._chunk_s
        demand = traffic.share_of(adapter) * traffic.requests_per_s * read_s
        return min(placement.max_homes, 1 + int(demand / placement.home_share))

    def _finished(self) -> Outcome:
        outcome, now = self.outcome, max(self.clock.now, 1e-9)
        workers = self.workers.values()
        outcome.num_arrived = self._num_created
        outcome.num_loads = sum(worker.memory.num_loads for worker in workers)
        outcome.num_fills = sum(worker.engine.num_fills for worker in workers)
        for role in sorted({worker.role for worker in workers}):
            engines = [worker.engine for worker in workers if worker.role == role]
            reading_s, generating_s = (
                sum(each.reading_s for each in engines),
                sum(each.decode.busy_s for each in engines),
            )
            outcome.busy[f"{role}_reading"] = round(reading_s / len(engines) / now, 4)
            outcome.busy[f"{role}_generating"] = round(generating_s / len(engines) / now, 4)
        return outcome


def revision_of(adapter: int) -> str:
    """An id as long as real ones."""
    return f"sha256:{adapter:064x}"
