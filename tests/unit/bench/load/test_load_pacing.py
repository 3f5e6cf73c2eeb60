"""When sessions start. Kolmogorov-Smirnov tests have fixed seeds, so they give the same answer every time."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from scipy import stats

from bench.errors import BenchError
from bench.load.pacing import Bursts, due_times

MIN_P = 0.05


def first(count: int, arrivals: str, per_s: float, seed: int = 1, bursts: Bursts | None = None) -> list[float]:
    return list(islice(due_times(arrivals, per_s, seed, bursts), count))


def test_a_constant_rate():
    assert first(5, "constant", 4.0) == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("per_s", [0.5, 300.0])
def test_poisson_gaps_are_exponential_and_independent(per_s: float):
    due = first(4000, "poisson", per_s)
    gaps = [after - before for before, after in pairwise(due)]
    assert stats.kstest(gaps, "expon", args=(0, 1 / per_s)).pvalue > MIN_P
    assert abs(stats.pearsonr(gaps[:-1], gaps[1:]).statistic) < 0.05


def test_bursts_keep_the_mean_rate_and_their_share():
    """Within a burst and between two, arrivals are uniform: a Poisson process given its count."""
    bursts = Bursts(period_s=10.0, length_s=2.0, factor=3.0)
    due = first(20_000, "bursts", 50.0, bursts=bursts)
    assert len(due) / due[-1] == pytest.approx(50.0, rel=0.03)
    inside = [at % 10 for at in due if at % 10 < 2]
    between = [at % 10 for at in due if at % 10 >= 2]
    assert len(inside) / len(due) == pytest.approx(0.6, abs=0.01)
    assert stats.kstest(inside, "uniform", args=(0, 2)).pvalue > MIN_P
    assert stats.kstest(between, "uniform", args=(2, 8)).pvalue > MIN_P


def test_bursts_may_take_all():
    due = first(1000, "bursts", 5.0, bursts=Bursts(period_s=10.0, length_s=1.0, factor=10.0))
    assert all(at % 10 <= 1 + 1e-9 for at in due)
    assert due == sorted(due)


@pytest.mark.parametrize("arrivals", ["poisson", "bursts"])
def test_seeds(arrivals: str):
    assert first(100, arrivals, 7.0, seed=3) == first(100, arrivals, 7.0, seed=3)
    assert first(100, arrivals, 7.0, seed=3) != first(100, arrivals, 7.0, seed=4)


@pytest.mark.parametrize(
    ("arrivals", "per_s", "bursts", "says"),
    [
        ("poisson", 0.0, None, "a rate of 0"),
        ("sometimes", 1.0, None, "'sometimes'"),
        ("bursts", 1.0, Bursts(10.0, 11.0, 1.0), "11 s every 10 s"),
        ("bursts", 1.0, Bursts(10.0, 1.0, 11.0), "1 to 10 are possible"),
    ],
)
def test_what_makes_no_sense_is_refused(arrivals: str, per_s: float, bursts: Bursts | None, says: str):
    with pytest.raises(BenchError, match=says):
        due_times(arrivals, per_s, 1, bursts)
