"""The SDK goes on while `prelude trainer`, behind a router and mutual TLS, is killed: no number differs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.clusters.certificates import authority
from support.in_thread import in_thread
from support.router_stand_ins import running_cluster
from support.training.trainer import ADAM, KillableTrainer, sdk_data, states

from cluster.local.demo import make_demo

STEPS = 6


def run(url: str, disturb: Callable[[str], None]) -> list[Any]:
    """Every number that two models come to. `disturb` is told where the run is."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    models = [service.create_lora_training_client(base_model="demo", rank=4, seed=seed).result() for seed in (1, 2)]
    numbers: list[Any] = []
    path = ""
    for step in range(STEPS):
        sent = [(each.forward_backward(sdk_data(step), "cross_entropy"), each.optim_step(ADAM)) for each in models]
        disturb(f"sent {step}")
        for passed, stepped in sent:
            output = passed.result()
            numbers.append([list(each["logprobs"].data) for each in output.loss_fn_outputs])
            numbers.append((output.metrics, stepped.result().metrics))
        if step == 2:
            path = models[0].save_state("middle").result().path
            disturb("saved")
    passed = models[1].forward_backward(sdk_data(0), "cross_entropy").result()
    disturb("summed")  # a gradient without its step
    numbers.append((passed.metrics, models[1].optim_step(ADAM).result().metrics))
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    disturb("resumed")
    numbers.append(resumed.forward(sdk_data(9), "cross_entropy").result().metrics)
    numbers.append(models[0].save_state("end").result().path.partition("/weights/")[2])
    service.close("success").result()
    return numbers


@pytest.mark.slow
@pytest.mark.timeout(900)  # three starts, and the SDK's pauses between retries
def test_kills_change_no_bit(tmp_path: Path):
    trainer = KillableTrainer(make_demo(tmp_path / "toy"), tmp_path / "trainer", authority(tmp_path / "ca"))
    trainer.start()
    with in_thread(running_cluster(0, 0, trainer=trainer.address)) as router:
        check_kills(router.url, trainer)
    trainer.kill()


@pytest.mark.slow
def test_a_stopped_trainer_has_not_failed(tmp_path: Path):
    trainer = KillableTrainer(make_demo(tmp_path / "toy"), tmp_path / "trainer")
    trainer.start()
    trainer.process.terminate()
    trainer.process.join()
    assert trainer.process.exitcode == 0


def check_kills(url: str, trainer: KillableTrainer) -> None:
    undisturbed = run(url, lambda _: None)
    kills = iter(("sent 1", "summed"))
    at = [next(kills)]

    def kill(where: str) -> None:
        if at[0] == where:
            trainer.kill()
            trainer.start()
            at[0] = next(kills, "")

    assert run(url, kill) == undisturbed
    assert at == [""]
    found = states(trainer.folder, "end")
    assert len(found) == 2
    assert found[0] == found[1]
