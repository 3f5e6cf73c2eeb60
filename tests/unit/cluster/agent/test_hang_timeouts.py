"""When an agent takes its engine for hung, by its configuration."""

import pytest

from cluster.agent.worker_agent import _hang_timeouts
from cluster.config.workers import EngineConfig
from engine.hang_watch import Timeouts


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"device": "cpu"}, Timeouts(10, 300, 150)),
        ({"device": "cuda"}, Timeouts(10, 300, 10)),
        ({"device": "cuda", "hang_timeout_s": 45}, Timeouts(45, 1350, 45)),
        ({"hang_timeout_s": None}, None),
    ],
)
def test_gpus_are_given_less_time_than_cpus(settings: dict, expected: Timeouts | None):
    assert _hang_timeouts(EngineConfig.model_validate(settings)) == expected
