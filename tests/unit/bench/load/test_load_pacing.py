"""When sessions start. Kolmogorov-Smirnov tests have fixed seeds, so they give the same answer every time."""

import re
from itertools import islice, pairwise

import pytest
from scipy import stats

from bench.errors import BenchError
from bench.load.options import Endpoint, Load, due_times
from bench.workloads.catalog import WORKLOADS

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


@pytest.mark.parametrize("rate", [0.0, 1e6])
def test_a_rate_has_bounds(rate: float):
    with pytest.raises(BenchError, match=re.escape(f"--rate {rate:g}: it must be above 0 and below a million")):
        Load(Endpoint("http://x", "m"), WORKLOADS["random"], requests_per_s=rate)
