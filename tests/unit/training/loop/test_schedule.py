"""The learning rate and the order of the data, which follow from the step alone."""

from typing import Any

import pytest

from training.errors import OptionInvalid
from training.loop.data_order import DataOrder
from training.loop.options import LoopOptions
from training.loop.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(peak=8.0, num_steps=8, num_warmup=4), [2, 4, 6, 8, 8, 6, 4, 2, 0]),
        (Schedule(peak=2.0, num_steps=4, decay="cosine"), [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
        (Schedule(peak=2.0, num_steps=4, num_warmup=2, decay="constant"), [1, 2, 2, 2]),
    ],
)
def test_warm_up_then_decay(schedule: Schedule, expected: list[float]):
    assert [schedule.at(step) for step in range(len(expected))] == pytest.approx(expected)


def test_every_epoch_has_every_example_once_in_an_order_of_its_own():
    order = DataOrder(num_examples=10, batch_size=4, seed=3)
    assert order.steps_per_epoch == 3
    epochs = [[number for step in range(3) for number in order.at(3 * epoch + step)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(order.at(step)) for step in range(3)] == [4, 4, 2]


def test_the_order_follows_from_the_seed_alone():
    """The numbers are fixed here, so that a release of numpy that changed them would be seen."""
    assert DataOrder(8, 8, seed=0).at(0) == [3, 2, 1, 6, 0, 7, 4, 5]
    assert DataOrder(8, 8, seed=1).at(0) != DataOrder(8, 8, seed=0).at(0)


def test_steps_of_part_of_an_epoch():
    order = DataOrder(num_examples=10, batch_size=4, seed=0)
    assert [order.num_steps(epochs) for epochs in (0.5, 1, 2.1)] == [2, 3, 7]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 0.0}, "the learning rate is 0; it must be positive"),
        ({"learning_rate": -1.0}, "the learning rate is -1"),
        ({"seed": -1}, "the seed is -1; it is from 0"),
        ({"seed": 2**63}, "the seed is"),
        ({"decay": "steps"}, "the decay is 'steps'"),
    ],
)
def test_options_of_the_loop_that_cannot_be(changed: dict[str, Any], message: str):
    with pytest.raises(OptionInvalid, match=message):
        LoopOptions(**{"learning_rate": 0.1} | changed)


@pytest.mark.parametrize(("num_examples", "steps"), [(150, 100), (16, 20), (16_000, 1000), (1600, 100)])
def test_few_rows_are_read_several_times(num_examples: int, steps: int):
    assert DataOrder(num_examples, 16, 0).num_steps(None) == steps
