"""`python -m bench.first_sample`: a trainer's new weights reach a sampler in every round."""

import argparse

import pytest

from bench import first_sample

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("pair", [False, True])
def test_every_round_is_measured(pair: bool):
    options = argparse.Namespace(model="tiny", device="cpu", rank=2, rounds=2, pair=pair, engine_arguments=[])
    found = first_sample.measure(options, "command")
    assert len(found["rounds"]) == 2
    for each in found["rounds"]:
        assert each["save_to_first_sample_s"] == pytest.approx(each["save_s"] + each["sample_s"], abs=1e-3)
        assert min(each.values()) > 0
