"""When sessions start. Kolmogorov-Smirnov tests have fixed seeds, so they give the same answer every time."""

import re
from itertools import islice, pairwise

import pytest
from scipy import stats

from bench.errors import BenchError
from bench.load.options import Endpoint, Load, due_times
from bench.workloads.catalog import WORKLOADS
from bench.workloads.lengths import Phase, PhasedLengths

MIN_P = 0.05


def first(count: int, per_s: float, seed: int = 1) -> list[float]:
    return list(islice(due_times(per_s, seed), count))


@pytest.mark.parametrize("per_s", [0.5, 300.0])
def test_poisson_gaps_are_exponential_and_independent(per_s: float):
    due = first(4000, per_s)
    gaps = [after - before for before, after in pairwise(due)]
    assert stats.kstest(gaps, "expon", args=(0, 1 / per_s)).pvalue > MIN_P
    assert abs(stats.pearsonr(gaps[:-1], gaps[1:]).statistic) < 0.05


def test_seeds():
    assert first(100, 7.0, seed=3) == first(100, 7.0, seed=3)
    assert first(100, 7.0, seed=3) != first(100, 7.0, seed=4)


def test_a_load_that_turns_has_the_rate_and_lengths_of_each_phase():
    """Its arrivals are made one by one, however many there are."""
    lengths = PhasedLengths(
        (Phase(8, 1, 200.0, 5.0), Phase(2, 9, 0.1, 4.0), Phase(8, 2, 50.0, 10.0), Phase(1, 1, 9e5, 1e8))
    )
    due = list(islice(lengths.due_s(3), 1501))
    assert due == sorted(due)
    assert 5 < due[1000] < 9 < due[1001]
    for first_due, last_due, began_s, seconds in ((0, 1000, 0.0, 5.0), (1001, 1501, 9.0, 10.0)):
        assert stats.kstest(due[first_due:last_due], "uniform", args=(began_s, seconds)).pvalue > MIN_P
    assert [lengths.of(1, session) for session in (0, 999, 1000, 1001, 1500, 1501)] == [
        *((8, 1), (8, 1), (2, 9), (8, 2), (8, 2), (1, 1)),
    ]  # fmt: skip
    assert list(islice(lengths.due_s(4), 9)) != due[:9]


@pytest.mark.parametrize("rate", [0.0, 1e6])
def test_a_rate_has_bounds(rate: float):
    with pytest.raises(BenchError, match=re.escape(f"--rate {rate:g}: it must be above 0 and below a million")):
        Load(Endpoint("http://x", "m"), WORKLOADS["random"], requests_per_s=rate)
