"""Workloads: equal bytes for equal seeds, and the distributions that they claim (Kolmogorov-Smirnov, fixed seeds)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from scipy import stats

from bench.errors import BenchError
from bench.workloads import conversations
from bench.workloads.catalog import WORKLOADS, workload_named
from bench.workloads.draws import Draws
from bench.workloads.lengths import ChosenLengths, FixedLengths, PunicaLengths
from bench.workloads.popularity import Popularity
from bench.workloads.session import CHAT, canonical_bytes
from bench.workloads.workload import Stream

MIN_P = 0.05
COUNT = 4000
MIN_P_OF_FOUR = MIN_P / 4  # where four comparisons are one test (Bonferroni)


def spread(values: Sequence[int], shares: Sequence[float]) -> list[float]:
    """Discrete values made uniform in (0, 1), if they have these shares: the randomised probability transform."""
    total = sum(shares)
    below = [each / total for each in accumulate(shares, initial=0.0)]
    draws = Draws("spread")
    return [below[value] + draws.uniform() * shares[value] / total for value in values]


def uniform_p(values: Sequence[float]) -> float:
    return float(stats.kstest(values, "uniform").pvalue)


# ---- draws ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "distribution"),
    [
        (Draws.uniform, stats.uniform()),
        (lambda draws: draws.exponential(2.0), stats.expon(0, 2.0)),
        (lambda draws: draws.lognormal(0.8, -1, 18), stats.lognorm(0.8, -1, 18)),
    ],
)
def test_draws_have_their_distribution(draw: Callable[[Draws], float], distribution):
    draws = Draws(5, "test")
    assert stats.kstest([draw(draws) for _ in range(COUNT)], distribution.cdf).pvalue > MIN_P


def test_integers_and_tokens_are_uniform():
    draws = Draws(6, "test")
    assert uniform_p(spread([draws.integer(0, 9) for _ in range(COUNT)], [1] * 10)) > MIN_P
    tokens = draws.tokens(COUNT, 16, 499)
    assert (min(tokens), max(tokens)) == (16, 499)
    assert uniform_p(spread([each - 16 for each in tokens], [1] * 484)) > MIN_P
    assert draws.tokens(0, 1, 2) == []


def test_draws_do_not_change_with_the_version_of_python():
    """The values themselves: a result file's digest would otherwise mean nothing."""
    draws = Draws(1, "a", 2)
    assert [round(draws.uniform(), 12) for _ in range(2)] == [0.876423681187, 0.844979351551]
    assert draws.tokens(3, 16, 499) == [257, 119, 185]


# ---- adapters -------------------------------------------------------------------------------------------------------


def picks(popularity: Popularity, num_adapters: int, count: int = COUNT, seed: int = 1) -> list[int]:
    pick = popularity.picker(num_adapters, seed)
    return [pick(session) for session in range(count)]


def test_uniform_adapters():
    assert uniform_p(spread(picks(Popularity("uniform"), 50), [1] * 50)) > MIN_P


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.44, 2.0])
def test_zipf_adapters(alpha: float):
    shares = [rank**-alpha for rank in range(1, 101)]
    found = picks(Popularity("zipf", alpha=alpha), 100)
    assert uniform_p(spread(found, shares)) > MIN_P
    assert uniform_p(spread(found, [rank ** -(alpha + 0.3) for rank in range(1, 101)])) < 1e-3


def test_skewed_adapters_are_those_of_sglang_and_punica():
    """sglang.bench_serving: weights alpha**-i."""
    found = picks(Popularity("skewed", alpha=1.5), 10)
    assert uniform_p(spread(found, [1.5**-rank for rank in range(10)])) > MIN_P


def test_adapters_without_chance():
    assert set(picks(Popularity("identical"), 9)) == {0}
    assert picks(Popularity("round-robin"), 3, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert picks(Popularity("distinct"), 100, 100) == list(range(100))


@pytest.mark.parametrize(
    ("popularity", "num_adapters", "says"),
    [
        (Popularity("best"), 2, "'best'"),
        (Popularity("uniform"), 0, "0 adapters"),
        (Popularity("zipf", alpha=0.0), 2, "alpha 0"),
        (Popularity("skewed", alpha=1.0), 2, r"\(1, 10\]"),
    ],
)
def test_adapters_that_make_no_sense(popularity: Popularity, num_adapters: int, says: str):
    with pytest.raises(BenchError, match=says):
        popularity.picker(num_adapters, 1)


def test_the_few_adapters_of_databricks_are_as_many_as_four():
    shares = WORKLOADS["databricks-prefill"].popularity.weights(16)
    assert sum(shares) ** 2 / sum(each**2 for each in shares) == pytest.approx(4.0, abs=0.05)


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_punica_lengths_differ_from_its_code_as_the_description_says():
    outputs = [PunicaLengths().of(1, number)[1] for number in range(20_000)]
    assert sum(each == 2 for each in outputs) / len(outputs) == pytest.approx(0.0005, abs=0.0005)
    assert sum(outputs) / len(outputs) == pytest.approx(1013, rel=0.015)
    assert "of ours 0.05 %" in WORKLOADS["punica"].text


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


def test_lengths_in_a_range():
    lengths = [FixedLengths(100, 40, 0.5).of(1, session) for session in range(COUNT)]
    assert uniform_p(spread([prompt - 50 for prompt, _ in lengths], [1] * 51)) > MIN_P
    assert uniform_p(spread([output - 20 for _, output in lengths], [1] * 21)) > MIN_P
    assert FixedLengths(100, 40).of(1, 7) == (100, 40)


def test_chosen_lengths():
    pairs = tuple((prompt, 1) for prompt in range(12))
    found = [ChosenLengths(pairs).of(1, session)[0] for session in range(COUNT)]
    assert uniform_p(spread(found, [1] * 12)) > MIN_P


# ---- conversations --------------------------------------------------------------------------------------------------


def ranges_p(values: Sequence[int], low: int, high: int) -> float:
    """Of whole numbers from `low` to `high`, each as likely."""
    return uniform_p(spread([value - low for value in values], [1] * (high - low + 1)))


def num_words(message: dict[str, Any]) -> int:
    return len(message["content"].split())


def test_chats_have_the_turns_words_answers_and_pauses_that_they_claim():
    chats = [conversations.chat(3, number, None) for number in range(1000)]
    turns = [turn for chat in chats for turn in chat]
    assert ranges_p([len(chat) for chat in chats], 2, 6) > MIN_P_OF_FOUR
    assert ranges_p([num_words(turn.content["messages"][-1]) for turn in turns], 8, 64) > MIN_P_OF_FOUR
    assert ranges_p([turn.max_tokens for turn in turns], 64, 256) > MIN_P_OF_FOUR
    pauses_s = [turn.pause_s for chat in chats for turn in chat[1:]]
    assert max(pauses_s) == 10.0
    shorter = [pause_s for pause_s in pauses_s if pause_s < 10.0]
    assert stats.kstest(shorter, stats.truncexpon(5.0, scale=2.0).cdf).pvalue > MIN_P_OF_FOUR
    assert len(shorter) / len(pauses_s) == pytest.approx(1 - math.exp(-5.0), abs=0.005)


def test_agents_have_the_steps_results_and_calls_that_they_claim():
    agents = [conversations.agent(3, number, None) for number in range(500)]
    assert ranges_p([len(agent) for agent in agents], 3, 10) > MIN_P_OF_FOUR
    results = [num_words(step.content["messages"][-1]) for agent in agents for step in agent[1:]]
    assert ranges_p(results, 50, 400) > MIN_P_OF_FOUR
    assert ranges_p([step.max_tokens for agent in agents for step in agent[:-1]], 32, 96) > MIN_P_OF_FOUR
    assert ranges_p([agent[-1].max_tokens for agent in agents], 200, 400) > MIN_P_OF_FOUR


# ---- named workloads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
class TestEach:
    def test_it_says_what_it_is_and_where_it_comes_from(self, name: str):
        workload = workload_named(name)
        assert len(workload.text) > 20
        assert workload.source
        assert (workload.concurrency is None) != (workload.requests_per_s is None)

    def test_equal_seeds_give_equal_bytes(self, name: str):
        workload = workload_named(name)
        num_adapters = max(1, workload.num_adapters)
        one, again, other = (Stream(workload, seed, num_adapters) for seed in (1, 1, 2))
        assert one.digest(20) == again.digest(20)
        assert one.digest(20) != other.digest(20)

    def test_sessions_do_not_depend_on_the_ones_before(self, name: str):
        """So several processes each make their part of one stream."""
        workload = workload_named(name)
        stream = Stream(workload, 1, workload.num_adapters)
        in_order = [canonical_bytes(stream.session(number)) for number in range(6)]
        backwards = [canonical_bytes(stream.session(number)) for number in reversed(range(6))]
        assert in_order == backwards[::-1]


def test_the_bytes_of_a_workload_are_pinned():
    assert Stream(WORKLOADS["punica"], 1, 32).digest(10) == (
        "09bb0e6d46d3122705685365eddc373f897df1529040b4e9b665dcf6e52789e1"
    )
    assert Stream(WORKLOADS["chat"], 1, 64).digest(10) == (
        "3731def483e706edc9cf6c7e5d8dab8ff3c98b866b90e1d1a63a561cf5a217c4"
    )


def test_prompts_differ_from_each_other():
    stream = Stream(replace(WORKLOADS["random"], lengths=FixedLengths(8, 1)), 1, 0)
    prompts = [tuple(session.requests[0].content["prompt"]) for session in stream.sessions(500)]
    assert len(set(prompts)) == 500
    assert all(16 <= token < 500 for prompt in prompts for token in prompt)


def test_as_many_requests_as_asked_for():
    stream = Stream(WORKLOADS["chat"], 1, 4)
    sessions = list(stream.sessions(23))
    assert sum(len(session.requests) for session in sessions) == 23
    assert [session.number for session in sessions] == list(range(len(sessions)))


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_conversations_grow_and_share_their_system_prompt(name: str):
    workload = WORKLOADS[name]
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
    systems = {(each.adapter, each.requests[0].content["messages"][0]["content"]) for each in sessions}
    assert len(systems) == len({adapter for adapter, _ in systems})  # one per adapter
    assert 1 < len({text for _, text in systems}) <= 8
    mean = sum(len(session.requests) for session in sessions) / len(sessions)
    assert mean == pytest.approx(workload.turns, rel=0.06)  # the rate of sessions follows from it
    has_tools = ["tools" in session.requests[0].content for session in sessions]
    assert all(has_tools) if name == "agent" else not any(has_tools)
    if name == "agent":
        last = sessions[0].requests[-1].content["messages"]
        assert Counter(each["role"] for each in last)["tool"] == len(sessions[0].requests) - 1


def test_pauses_of_users_are_exponential():
    stream = Stream(WORKLOADS["chat"], 1, 4)
    pauses = [request.pause_s for number in range(500) for request in stream.session(number).requests[1:]]
    below = [1 - math.exp(-each / 2) for each in pauses if each < 10]
    limit = 1 - math.exp(-5)
    assert uniform_p([each / limit for each in below]) > MIN_P
    assert max(pauses) <= 10.0


def test_an_unknown_workload():
    with pytest.raises(BenchError, match="there is no workload 'x'; there are random, punica"):
        workload_named("x")
    with pytest.raises(BenchError, match="--vocabulary 16"):
        Stream(replace(WORKLOADS["random"], vocabulary=16), 1, 0)
