"""Workloads: the same bytes for a seed on every machine, and the distributions that they claim (fixed seeds)."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
from scipy import stats

from bench.workloads.catalog import WORKLOADS
from bench.workloads.draws import Draws
from bench.workloads.lengths import PunicaLengths
from bench.workloads.popularity import Popularity
from bench.workloads.session import CHAT
from bench.workloads.workload import Stream

MIN_P = 0.05
COUNT = 4000
# Of the first 64 requests under seed 1: a result file's digest would otherwise mean nothing.
DIGESTS = {
    "random": "9dbf804f1fc64c93",
    "punica": "e68ba51ab9218e4d",
    "pioneer": "afbf675c64f4f644",
    "databricks-prefill": "819081f16df6d9bb",
    "databricks-decode": "ff95fe112c8d639b",
    "chat": "8c24e48d630baaf7",
}


def spread(values: Sequence[int], shares: Sequence[float]) -> list[float]:
    """Discrete values made uniform in (0, 1), if they have these shares: the randomised probability transform."""
    total = sum(shares)
    below = [each / total for each in accumulate(shares, initial=0.0)]
    draws = Draws("spread")
    return [below[value] + draws.uniform() * shares[value] / total for value in values]


def uniform_p(values: Sequence[float]) -> float:
    return float(stats.kstest(values, "uniform").pvalue)


# ---- adapters -------------------------------------------------------------------------------------------------------


def picks(popularity: Popularity, num_adapters: int, count: int = COUNT) -> list[int]:
    pick = popularity.picker(num_adapters, 1)
    return [pick(session) for session in range(count)]


@pytest.mark.parametrize(
    ("popularity", "share", "is_so"),
    [
        (Popularity("uniform"), lambda rank: 1.0, True),
        *((Popularity("zipf", alpha=alpha), lambda rank, a=alpha: rank**-a, True) for alpha in (0.5, 1.0, 1.44, 2.0)),
        (Popularity("zipf", alpha=1.0), lambda rank: rank**-1.3, False),
        (Popularity("skewed", alpha=1.1), lambda rank: 1.1**-rank, True),  # as sglang.bench_serving has it
    ],
)
def test_adapters_have_their_shares(popularity: Popularity, share: Callable[[int], float], is_so: bool):
    p = uniform_p(spread(picks(popularity, 100), [share(rank) for rank in range(1, 101)]))
    assert p > MIN_P if is_so else p < 1e-3


def test_adapters_without_chance():
    assert set(picks(Popularity("identical"), 9)) == {0}
    assert picks(Popularity("round-robin"), 3, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert picks(Popularity("distinct"), 100, 100) == list(range(100))


def test_the_few_adapters_of_databricks_are_as_many_as_four():
    shares = WORKLOADS["databricks-prefill"].popularity.weights(16)
    assert sum(shares) ** 2 / sum(each**2 for each in shares) == pytest.approx(4.0, abs=0.05)


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_punica_lengths():
    """Prompts: the lognormal distribution, rounded down. Totals: uniform given the prompt."""
    lengths = [PunicaLengths().of(1, session) for session in range(COUNT)]
    assert all(1 <= prompt <= 2046 and output >= 2 and prompt + output <= 2048 for prompt, output in lengths)
    law = stats.lognorm(0.8, -1, 18)
    shares = [law.cdf(2)] + [law.cdf(length + 1) - law.cdf(length) for length in range(2, 2047)]
    assert uniform_p(spread([prompt - 1 for prompt, _ in lengths], shares)) > MIN_P
    draws = Draws("totals")
    totals = [(output - 2 + draws.uniform()) / (2048 - prompt - 1) for prompt, output in lengths]
    assert uniform_p(totals) > MIN_P


# ---- named workloads ------------------------------------------------------------------------------------------------


def test_the_bytes_of_every_workload_are_pinned():
    def digest(name: str, seed: int) -> str:
        return Stream(WORKLOADS[name], seed, max(1, WORKLOADS[name].num_adapters)).digest(64)[:16]

    assert {name: digest(name, 1) for name in WORKLOADS} == DIGESTS
    assert not {digest(name, 2) for name in WORKLOADS} & {*DIGESTS.values()}


def test_as_many_requests_as_asked_for():
    sessions = list(Stream(WORKLOADS["chat"], 1, 4).sessions(23))
    assert sum(len(session.requests) for session in sessions) == 23
    assert [session.number for session in sessions] == list(range(len(sessions)))


def test_conversations_grow_and_share_their_system_prompt():
    workload = WORKLOADS["chat"]
    stream = Stream(workload, 1, workload.num_adapters)
    sessions = [stream.session(number) for number in range(300)]
    for session in sessions:
        before: list[object] = []
        for request in session.requests:
            messages = request.content["messages"]
            assert messages[: len(before)] == before
            assert len(messages) > len(before)
            assert request.path == CHAT
            before = messages
    requests = [each for session in sessions for each in session.requests]
    lengths = [len(session.requests) for session in sessions]
    assert (min(lengths), max(lengths)) == (2, 6)
    assert 9.0 <= max(each.pause_s for each in requests) <= 10.0
    assert sum(lengths) / len(sessions) == pytest.approx(workload.turns, rel=0.06)  # the rate of sessions follows
    assert (min(each.max_tokens for each in requests), max(each.max_tokens for each in requests)) == (64, 256)
    systems = {(each.adapter, each.requests[0].content["messages"][0]["content"]) for each in sessions}
    assert len(systems) == len({adapter for adapter, _ in systems})  # one per adapter
    assert 1 < len({text for _, text in systems}) <= 8
