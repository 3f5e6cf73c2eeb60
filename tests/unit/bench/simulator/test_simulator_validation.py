"""Curves measured from outside are those inside: the endpoint is the simulator itself, whose curves are known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from bench.errors import SystemFailed
from bench.load.record import Record
from bench.simulator.curves import Curves, Decode, Limits, Line, Loads, Prefill
from bench.simulator.run import Run
from bench.simulator.scenario import Pools, Scenario
from bench.simulator.traffic import Arrival, ClosedLoop, Replay
from bench.simulator.validation.check import errors, simulated
from bench.simulator.validation.measure import Grid, Wave, measure_curves

TRUE = Curves(
    name="true",
    text="",
    sources={},
    prefill=Prefill(((0, 4), (512, 80)), prompt_ms=1.5, adapter_factor=1.2),
    decode=Decode(((1, 8), (16, 20)), kv_token_ns=2000.0),
    loads=Loads(store_ms=60, disk_ms=60, serial_ms=15),
    limits=Limits(chunk_tokens=8192, max_running=16, max_kv_tokens=30_000, slots=8),
    answer_ms=3.0,
)


class Loop(ClosedLoop):
    """A closed loop whose requests choose their adapters."""

    def __init__(self, wave: Wave) -> None:
        ClosedLoop.__init__(self, wave.concurrency, wave.num_requests, wave.prompt_tokens, wave.output_tokens)
        object.__setattr__(self, "wave", wave)

    def arrival(self, number: int, at_s: float) -> Arrival:
        chosen = self.wave.adapters  # type: ignore[attr-defined]
        adapter = chosen[number % len(chosen)] if chosen else None
        return Arrival(at_s, adapter, self.prompt_tokens, self.output_tokens)


class SimulatedEndpoint:
    """Answers waves by simulation. Adapters stay loaded from one wave to the next."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    async def beside(self, stream: Wave, wave: Wave) -> tuple[Sequence[Record], Sequence[Record]]:
        """The prompts come so far apart that each is read alone."""
        first = Arrival(0.0, None, stream.prompt_tokens, stream.output_tokens)
        others = [Arrival(0.5 + n / 4, None, wave.prompt_tokens, 1) for n in range(wave.num_requests)]
        outcome = Run(Scenario(TRUE, Pools(unified=1), Replay([first, *others])), 1).run()
        records = [
            Record(0, 0, at_s, at_s, end_s, token_s=(at_s + ttft_s, end_s))
            for at_s, ttft_s, end_s in zip(outcome.at_s, outcome.ttft_s, outcome.end_s, strict=True)
        ]
        return [each for each in records if not each.sent_s], [each for each in records if each.sent_s]

    async def send(self, wave: Wave) -> Sequence[Record]:
        run = Run(Scenario(TRUE, Pools(unified=1), Loop(wave)), 1)
        (worker,) = run.workers.values()
        worker.memory.fill(f"sha256:{adapter:064x}" for adapter in sorted(self.seen))
        self.seen.update(wave.adapters)
        outcome = run.run()
        records = []
        for number, (at_s, ttft_s, end_s) in enumerate(zip(outcome.at_s, outcome.ttft_s, outcome.end_s, strict=True)):
            tokens = (
                tuple(np.linspace(at_s + ttft_s, end_s, wave.output_tokens)) if wave.output_tokens > 1 else (end_s,)
            )
            records.append(
                Record(number, 0, at_s, at_s, end_s, token_s=tokens, output_tokens=wave.output_tokens, prompt_tokens=1)
            )
        return records


def test_what_is_measured_is_what_is_there() -> None:
    endpoint = SimulatedEndpoint()
    found = asyncio.run(measure_curves(endpoint.send, endpoint.beside, Grid(), TRUE.limits, "found", ""))
    true, batch = Line(TRUE.prefill.batch_ms), Line(found.prefill.batch_ms)
    for tokens in (16, 64, 300, 512):
        assert batch(tokens) == pytest.approx(true(tokens) + TRUE.prefill.prompt_ms, rel=0.02)
    assert found.prefill.adapter_factor == pytest.approx(1.2, rel=0.03)
    step, known = Line(found.decode.step_ms), Line(TRUE.decode.step_ms)
    for number in (1, 4, 16):
        assert step(number) == pytest.approx(known(number), rel=0.1)
    assert found.decode.kv_token_ns == pytest.approx(2000, rel=0.3)
    assert found.loads.store_ms == pytest.approx(60, rel=0.05)
    assert found.loads.serial_ms == pytest.approx(15, rel=0.15)
    assert found.limits == TRUE.limits
    assert found.answer_ms == pytest.approx(3.0, rel=0.1)


def test_a_failed_request_ends_the_measurement() -> None:
    async def send(wave: Wave) -> Sequence[Record]:
        return [Record(0, 0, 0.0, 0.0, 1.0, error="timed_out", detail="late")]

    with pytest.raises(SystemFailed, match="timed_out late"):
        asyncio.run(measure_curves(send, SimulatedEndpoint().beside, Grid(), TRUE.limits, "found", ""))


def test_the_error_of_a_simulation_of_itself_is_nothing() -> None:
    names = ("a0", "a1")
    asked = [
        Record(n, 0, n / 10, n / 10, n / 10 + 1.0, adapter=names[n % 2], prompt_tokens=64, output_tokens=8)
        for n in range(30)
    ]
    outcome = simulated(asked, names, TRUE, is_warm=True)
    assert list(outcome.was_cold) == [0] * 30
    order = np.argsort(outcome.at_s)
    answered = [
        Record(
            n,
            0,
            outcome.at_s[i],
            outcome.at_s[i],
            outcome.end_s[i],
            token_s=(outcome.at_s[i] + outcome.ttft_s[i], outcome.end_s[i]),
            output_tokens=8,
        )
        for n, i in enumerate(order)
    ]
    found = errors(answered, outcome)
    assert [found[name] for name in found if name.startswith("error_")] == [0.0] * 4
    assert sum(simulated(asked, names, TRUE, is_warm=False).was_cold) >= 2
