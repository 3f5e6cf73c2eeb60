"""The simulated engine against queueing theory, and its arithmetic against sums done by hand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from bench.simulator.clock import Clock
from bench.simulator.curves import Curves, Decode, EngineTimes, Limits, Line, Loads, Prefill, Transfer
from bench.simulator.decode_batch import DecodeBatch
from bench.simulator.run import Scenario, simulate
from bench.simulator.traffic import Arrival, Traffic
from bench.systems.layout import Layout


def curves(
    *,
    batch_ms: tuple[tuple[float, float], ...] = ((0, 0), (1000, 100)),
    step_ms: tuple[tuple[float, float], ...] = ((1, 10),),
    kv_token_ns: float = 0.0,
    pair_ns: float = 0.0,
    **others: Limits | Transfer | Loads,
) -> Curves:
    prefill, decode = Prefill(batch_ms, pair_ns=pair_ns), Decode(step_ms, kv_token_ns)
    return Curves(name="test", text="", sources={}, prefill=prefill, decode=decode, **others)


@dataclass(frozen=True)
class Replay(Traffic):
    """Requests that are known one by one."""

    requests: Sequence[Arrival] = ()

    def arrivals(self, seed: int) -> Iterator[Arrival]:
        return iter(self.requests)


def replay(requests: Sequence[Arrival]) -> Replay:
    return Replay(0.0, 0.0, requests=requests)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0.5, 0.8])
def test_prompts_wait_as_in_m_d_1(busy: float) -> None:
    """One prompt a batch: Pollaczek and Khinchine, W = ρ s / 2 (1 - ρ)."""
    service_s = 0.1
    only_one = curves(limits=Limits(chunk_tokens=1000))
    traffic = Traffic(busy / service_s, 2_000.0, prompt_tokens=1000, output_tokens=1)
    outcome = simulate(Scenario(only_one, Layout(unified=1), traffic))
    waits = np.array(outcome.ttft_s) - service_s
    assert waits.min() == pytest.approx(0, abs=1e-6)
    assert waits.mean() == pytest.approx(busy * service_s / (2 * (1 - busy)), rel=0.12)
    assert outcome.busy["unified_reading"] == pytest.approx(busy, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.0, 1.5])
def test_sequences_share_an_engine_as_in_m_g_1_ps(cv: float) -> None:
    """Steps that take as long as the batch is large: processor sharing, T = s / (1 - ρ) whatever the lengths."""
    shared = curves(batch_ms=((0, 0),), step_ms=((0, 0), (1, 1), (10_000, 10_000)), limits=Limits(max_running=10_000))
    tokens, busy = 500, 0.6
    traffic = Traffic(busy / (tokens * 0.001), 8_000.0, prompt_tokens=1, output_tokens=tokens, length_cv=cv)
    outcome = simulate(Scenario(shared, Layout(unified=1), traffic))
    lasted = np.array(outcome.end_s) - np.array(outcome.at_s)
    assert lasted.mean() == pytest.approx(tokens * 0.001 / (1 - busy), rel=0.1)


@pytest.mark.slow
def test_a_limit_of_running_sequences_makes_m_m_c() -> None:
    """c sequences at a time whose steps do not slow each other: Erlang's C."""
    servers, service_s, busy = 4, 1.0, 0.75
    limited = curves(batch_ms=((0, 0),), step_ms=((1, 1),), limits=Limits(max_running=servers))
    offered = busy * servers
    random = np.random.default_rng(5)
    times = np.cumsum(random.exponential(service_s / offered, 20_000))
    lengths = np.maximum(2, np.rint(random.exponential(service_s * 1000, len(times))).astype(int))
    requests = [Arrival(at_s, None, 1, n) for at_s, n in zip(times.tolist(), lengths.tolist(), strict=True)]
    outcome = simulate(Scenario(limited, Layout(unified=1), replay(requests)))
    terms = [offered**k / np.prod(np.arange(1, k + 1), dtype=float) for k in range(servers + 1)]
    last = terms[servers] / (1 - busy)
    waiting = last / (sum(terms[:servers]) + last)
    assert np.mean(outcome.ttft_s) == pytest.approx(waiting * service_s / (servers * (1 - busy)), rel=0.1)


def test_one_request_takes_the_sum_of_its_parts() -> None:
    """Two chunks of a prompt, the transfer, and steps over growing KV."""
    slow = curves(
        kv_token_ns=1000.0,
        pair_ns=10.0,
        limits=Limits(chunk_tokens=600),
        transfer=Transfer(((0, 5), (1000, 25))),
        loads=Loads(store_ms=300, fill_ms=7),
    )
    scenario = Scenario(slow, Layout(prefill=1, decode=1), replay([Arrival(0.0, 0, 1000, 11)]), is_warm=False)
    outcome = simulate(scenario)
    attention_ms = 10e-6 * (600 * 300 + 400 * (600 + 200))
    read_ms = 60 + 40 + attention_ms + 2 * 0 + 7
    assert 1000 * outcome.ttft_s[0] == pytest.approx(300 + read_ms + 25)
    decode_ms = 10 * (10 + 1001 * 1e-3) + 1e-3 * 10 * 10 / 2
    assert 1000 * (outcome.end_s[0] - outcome.ttft_s[0]) == pytest.approx(decode_ms)
    assert (outcome.num_loads, list(outcome.was_cold)) == (1, [1])


def test_prompts_of_one_batch_share_its_time_and_stop_the_answers() -> None:
    """A sequence generates 100 tokens of 10 ms; prompts of 1000 tokens come at 0.5 s, in two batches of 100 ms."""
    requests = [Arrival(0.0, None, 1, 101), *(Arrival(0.5, None, 500, 1) for _ in range(4))]
    outcome = simulate(Scenario(curves(limits=Limits(chunk_tokens=1000)), Layout(unified=1), replay(requests)))
    ends = dict(zip(outcome.at_s, outcome.end_s, strict=True))
    assert ends[0.0] == pytest.approx(1.0 + 0.2, abs=0.02)
    assert sorted(outcome.ttft_s)[1:] == pytest.approx([0.1, 0.1, 0.2, 0.2], abs=0.02)


@pytest.mark.parametrize(("num_sequences", "gap_s"), [(7, 0.1), (8, 0.13)])
def test_batches_of_prompts_wait_for_steps_of_many_sequences(num_sequences: int, gap_s: float) -> None:
    """Three steps of 10 ms between two batches of 100 ms each."""
    limits = Limits(chunk_tokens=1000, prompts_wait_steps=3)
    requests = [Arrival(0.0, None, 1, 101) for _ in range(num_sequences)]
    requests += [Arrival(0.5, None, 1000, 1) for _ in range(3)]
    outcome = simulate(Scenario(curves(limits=limits), Layout(unified=1), replay(requests)))
    first, *later = sorted(ttft_s for at_s, ttft_s in zip(outcome.at_s, outcome.ttft_s, strict=True) if at_s)
    assert [after - first for after in later] == pytest.approx([gap_s, 2 * gap_s], abs=0.001)


def test_a_step_is_not_interrupted() -> None:
    clock, ended = Clock(), []
    times = EngineTimes(curves(step_ms=((1, 10), (2, 30))))
    batch: DecodeBatch[str] = DecodeBatch(times, clock, lambda each: ended.append((each, clock.now)))
    batch.join("a", 5, 3)
    clock.run_until(0.012)
    assert batch.until_boundary_s() == pytest.approx(0.008)
    clock.after(batch.until_boundary_s(), batch.join, "b", 5, 1)
    clock.run_out()
    assert ended == [("a", pytest.approx(0.05)), ("b", pytest.approx(0.05))]
    assert len(batch) == 0


def test_two_loads_at_once_end_apart() -> None:
    loads = Loads(store_ms=100, serial_ms=40, parallel=8)
    requests = [Arrival(0.0, number, 1, 1) for number in range(5)]
    outcome = simulate(
        Scenario(curves(loads=loads, batch_ms=((0, 0.001),)), Layout(unified=1), replay(requests), is_warm=False)
    )
    ready = sorted(outcome.ttft_s)
    assert ready[0] == pytest.approx(0.1, abs=0.001)
    assert all(after - before == pytest.approx(0.04, abs=0.001) for before, after in pairwise(ready))


def test_lines_go_on_beyond_their_points() -> None:
    line = Line([(10, 5), (20, 7), (40, 8)])
    assert [line(x) for x in (0, 10, 15, 20, 30, 40, 60)] == [5, 5, 6, 7, 7.5, 8, 9]
    assert Line([(1, 3)])(100) == 3
