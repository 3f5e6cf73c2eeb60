"""Runs a scenario: requests arrive, are placed, wait for adapters, are read and answered; workers fail and return."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from itertools import islice
from random import Random

from bench.errors import BenchError
from bench.simulator.attempt import Attempt, SimulatedRequest
from bench.simulator.clock import Clock
from bench.simulator.curves import EngineTimes
from bench.simulator.outcome import CUT, FAILED, REFUSED, SERVED, Outcome
from bench.simulator.role_changes import RoleChanger
from bench.simulator.routers import Router, views_of
from bench.simulator.scenario import Loss, Scenario
from bench.simulator.traffic import Arrival, ClosedLoop, Traffic
from bench.simulator.worker import Worker, engine_factory
from router.fleet.fleet_state import Holders
from router.placement.policy import HOME_SHARE, MAX_ADAPTER_HOMES
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
        self._holders = Holders()
        factory = engine_factory(self._times, self.clock, self._read, self._first, self._ended)
        roles, racks = scenario.pools.roles(), scenario.pools.racks
        digits = len(str(len(roles)))
        self.workers: dict[str, Worker] = {}
        for number, role in enumerate(roles):
            name, rack = f"{role}-{number:0{digits}}", f"rack-{number % racks}"
            self.workers[name] = Worker(
                name, role, rack, self.clock, scenario.loads, self._holders, factory, self._resident
            )
        self.routers = [
            Router(self.clock, Random(seed + 1000 * (number + 1)), self._holders)
            for number in range(scenario.num_routers)
        ]
        self._num_open = 0
        self._num_created = 0
        self._num_recurring = int(scenario.role_changes is not None)  # events beside `_report`, for which nobody waits
        self._has_arrivals = True
        self.refresh()

    def run(self) -> Outcome:
        began_s = time.process_time()
        scenario, clock = self.scenario, self.clock
        if scenario.is_warm:
            self._fill()
        self._report()
        for loss in scenario.losses:
            clock.after(loss.at_s, self._lose, loss, self._named(loss))
        if scenario.role_changes is not None:
            RoleChanger(scenario.role_changes, self).begin()
        if isinstance(scenario.traffic, ClosedLoop):
            for _ in range(min(scenario.traffic.concurrency, scenario.traffic.num_requests)):
                self._next_of_closed_loop()
        else:
            for arrival in scenario.traffic.arrivals(self._seed):
                clock.run_until(arrival.at_s)
                self._arrive(arrival)
        self._has_arrivals = False
        clock.run_out()
        return self._finished(began_s)

    @property
    def is_going_on(self) -> bool:
        """Whether anything is left to serve. Recurring events end when it is false."""
        return self._has_arrivals or self._num_open > 0

    def refresh(self) -> None:
        """Routers hear at once of a change that the simulation has let them know of."""
        views = views_of(self.workers.values())
        for router in self.routers:
            router.refresh(views)

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
        if placement is None:
            self._done(request, FAILED if request.num_attempts else REFUSED)
            return
        placed = router.placer.take(request.placement_request, placement)
        reader, generator = self.workers[placement.prefill.name], self.workers[placement.decode.name]
        attempt = Attempt(request, placed, reader, generator, request.prompt_tokens, self.clock.now)
        request.num_attempts += 1
        reader.attempts[attempt] = None
        generator.attempts[attempt] = None
        if not self._reaches(attempt, reader):
            return
        revision_id = request.placement_request.revision_id
        if revision_id is None:
            self._resident(attempt)
            return
        num_loads = reader.memory.num_loads
        if not reader.memory.ensure(revision_id, attempt):
            request.was_cold = True
        if reader.memory.num_loads > num_loads:
            self.outcome.cold_load_s.append(self.clock.now)

    def _reaches(self, attempt: Attempt, worker: Worker) -> bool:
        """Whether a call gets through. One to a worker that is silently dead fails after a while."""
        if not worker.is_up:
            self.clock.after(self.scenario.connect_timeout_s, self._unreachable, attempt, worker)
        return worker.is_up

    def _unreachable(self, attempt: Attempt, worker: Worker) -> None:
        self._fail(attempt, worker, was_reached=False)

    def _resident(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        waited_s = self.clock.now - attempt.placed_s
        if waited_s:
            self._router(attempt.request.number).placer.loaded(attempt.placed, waited_s)
        attempt.placed.in_flight[0].read_begins()
        if self._reaches(attempt, attempt.generator):
            self._count(attempt, awaits_room=True)
            attempt.generator.engine.admit(attempt, self._admitted)

    def _admitted(self, attempt: Attempt) -> None:
        self._count(attempt, is_unread=True)
        attempt.reader.engine.read(attempt)

    def _read(self, attempt: Attempt) -> None:
        self._count(attempt)
        attempt.placed.in_flight[0].read_ended()
        if attempt.is_pair:
            self.clock.after(self._times.transfer_s(attempt.request.prompt_tokens), self._transferred, attempt)
        else:
            attempt.generator.engine.generate(attempt)

    def _transferred(self, attempt: Attempt) -> None:
        if attempt.is_over or not attempt.reader.is_up:  # given up, or to be given up when its loss is noticed
            return
        del attempt.reader.attempts[attempt]
        if attempt.generator.is_up:
            attempt.generator.engine.generate(attempt)

    def _first(self, attempt: Attempt) -> None:
        attempt.request.first_s = self.clock.now + self._times.answer_s

    def _ended(self, attempt: Attempt) -> None:
        self._leave(attempt)
        attempt.request.end_s = self.clock.now + self._times.answer_s
        self._done(attempt.request, SERVED)

    def _count(self, attempt: Attempt, *, awaits_room: bool = False, is_unread: bool = False) -> None:
        """Keep what its engines report right: what it waits for now, if it does."""
        for worker in {attempt.reader, attempt.generator}:
            if worker.is_up:  # else its counts are lost
                worker.engine.num_awaiting_room += awaits_room - attempt.awaits_room
        if attempt.reader.is_up:
            attempt.reader.engine.num_unread += is_unread - attempt.is_unread
        attempt.awaits_room, attempt.is_unread = awaits_room, is_unread

    def _leave(self, attempt: Attempt) -> None:
        attempt.is_over = True
        self._count(attempt)
        if attempt.has_capacity and attempt.generator.is_up:
            attempt.generator.engine.release(attempt)
        attempt.placed.release()
        attempt.reader.attempts.pop(attempt, None)
        attempt.generator.attempts.pop(attempt, None)

    def _fail(self, attempt: Attempt, worker: Worker, *, was_reached: bool) -> None:
        """As the router does it: tried again elsewhere until there was a first token."""
        if attempt.is_over:
            return
        self._leave(attempt)
        request = attempt.request
        if not math.isnan(request.first_s):
            self._done(request, CUT)
            return
        request.failed = request.failed.with_worker(worker.name)
        if was_reached:
            request.failed = request.failed.with_placement(attempt.placed.placement)
        if request.num_attempts >= self.scenario.max_attempts:
            self._done(request, FAILED)
            return
        self.outcome.num_retries += 1
        self._place(request)

    def _done(self, request: SimulatedRequest, kind: int) -> None:
        outcome = self.outcome
        self._num_open -= 1
        outcome.at_s.append(request.at_s)
        outcome.ttft_s.append(request.first_s - request.at_s)
        outcome.end_s.append(request.end_s)
        tokens = request.output_tokens - 1
        outcome.tpot_s.append((request.end_s - request.first_s) / tokens if tokens else math.nan)
        outcome.kind.append(kind)
        outcome.was_cold.append(request.was_cold)
        if isinstance(self.scenario.traffic, ClosedLoop):
            self.clock.after(0.0, self._next_of_closed_loop)

    # ---- workers ----------------------------------------------------------------------------------------------------

    def _named(self, loss: Loss) -> list[Worker]:
        """Raises BenchError."""
        if unknown := set(loss.workers) - set(self.workers):
            raise BenchError(f"no worker {', '.join(sorted(unknown))} to lose; there are {', '.join(self.workers)}")
        found = [each for each in self.workers.values() if each.name in loss.workers or each.rack == loss.rack]
        if not found:
            raise BenchError(f"no rack {loss.rack!r} to lose; there are {self.scenario.pools.racks}")
        return found

    def _lose(self, loss: Loss, workers: list[Worker]) -> None:
        for worker in workers:
            worker.die()
        if loss.is_silent:
            self.clock.after(self.scenario.detect_s, self.notice, workers)
        else:
            self.notice(workers)
        if loss.back_after_s is not None:
            self.clock.after(loss.back_after_s, self.come_back, workers)

    def notice(self, workers: Iterable[Worker]) -> None:
        """Routers learn that these are lost, and try again elsewhere what waited there."""
        lost = [worker for worker in workers if not worker.is_up]
        for worker in lost:
            worker.is_known_up = False
        self.refresh()
        for worker in lost:
            for attempt in list(worker.attempts):
                self._fail(attempt, worker, was_reached=True)

    def come_back(self, workers: Iterable[Worker], role: str | None = None) -> None:
        """With a new engine and empty memory."""
        workers = list(workers)
        for worker in workers:
            if worker.is_up:  # another event had brought it back
                worker.die()
        self.notice(workers)
        for worker in workers:
            worker.come_back(role)
        self.refresh()

    def _report(self) -> None:
        """What every engine's agent says of its KV memory and its queues."""
        max_kv_tokens = self.scenario.curves.limits.max_kv_tokens
        for worker in self.workers.values():
            if worker.is_up:
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
        if not self._has_arrivals and self._num_open and self.clock.num_pending <= self._num_recurring:
            raise RuntimeError(f"{self._num_open} requests wait for an event that never comes")
        if self.is_going_on:
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
        """One, and one more for each `HOME_SHARE` of a worker's time, as placement has it."""
        traffic = self.scenario.traffic
        if not isinstance(traffic, Traffic):
            return 1
        read_s = traffic.prompt_tokens / self.scenario.curves.limits.chunk_tokens * self._chunk_s
        demand = traffic.share_of(adapter) * traffic.requests_per_s * read_s
        return min(MAX_ADAPTER_HOMES, 1 + int(demand / HOME_SHARE))

    def _finished(self, began_s: float) -> Outcome:
        outcome, now = self.outcome, max(self.clock.now, 1e-9)
        outcome.num_arrived = self._num_created
        outcome.num_loads = sum(worker.memory.num_loads for worker in self.workers.values())
        outcome.num_events = self.clock.num_events
        outcome.simulated_s = now
        engines = [(worker.role, engine) for worker in self.workers.values() for engine in worker.engines]
        outcome.num_fills = sum(engine.num_fills for _, engine in engines)
        for role in sorted({role for role, _ in engines}):
            number = sum(worker.role == role for worker in self.workers.values())
            of_role = [engine for each, engine in engines if each == role]
            outcome.busy[f"{role}_reading"] = round(sum(each.reading_s for each in of_role) / number / now, 4)
            outcome.busy[f"{role}_generating"] = round(sum(each.decode.busy_s for each in of_role) / number / now, 4)
        outcome.cpu_s = time.process_time() - began_s
        return outcome


def revision_of(adapter: int) -> str:
    """An id as long as real ones."""
    return f"sha256:{adapter:064x}"
