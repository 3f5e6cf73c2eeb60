"""What a run's losses say about what to try next."""

import pytest

from training.loop.data_order import DataOrder
from training.loop.trend import Trend


def advice(losses: list[float], **changed: bool) -> str:
    trend = Trend()
    for step, loss in enumerate(losses):
        trend.write(step, {"loss": loss})
        trend.write(step, {"eval_loss": 9.0})
    return trend.advice(**{"num_epochs": 10, "max_steps": None, "is_prompt_only": True, **changed})


def test_a_loss_that_is_still_falling_needs_more_epochs():
    assert advice([10.0 - step for step in range(8)]) == (
        "the loss was still falling, by 36% in the last quarter: try --epochs 20"
    )


def test_a_run_of_given_steps_needs_more_of_them():
    assert advice([10.0 - step for step in range(8)], max_steps=15).endswith("try --max-steps 30")


def test_a_loss_that_stalls_high_may_need_all_positions():
    assert advice([1.0] * 8) == "the loss has stalled at 1.00; if that is too high, try --positions all"
    assert advice([1.0] * 8, is_prompt_only=False) == "the loss has stalled at 1.00"


@pytest.mark.parametrize("losses", [[1.0] * 7, [4.0, 2.0, 1.0, 0.5, 0.2, 0.2, 0.2, 0.2], [0.0] * 8])
def test_nothing_is_said_of_a_run_that_is_short_or_has_converged(losses: list[float]):
    assert advice(losses) == ""


@pytest.mark.parametrize(("num_examples", "steps"), [(150, 100), (16, 20), (16_000, 1000), (1600, 100)])
def test_few_rows_are_read_several_times(num_examples: int, steps: int):
    assert DataOrder(num_examples, 16, 0).num_steps(None) == steps
