"""kill -9 at random points: the run that goes on is the run that was not killed, byte for byte."""

import multiprocessing
import random
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from support.training.small_runs import killable_run

HANG_S = 300.0
KILLS_IN_A_RUN = 5  # each one later in it, or while it resumes

# What a run imports, some of it only when it is under way. A child is forked with it, and costs a second, not ten.
PRELOADED = (
    "training.runs.run",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "transformers.generation.utils",
    "jinja2.sandbox",
    "torch._dynamo",  # by torch's optimisers
)


def started(setting, output: Path, kind: str, is_preference: bool) -> ForkServerProcess:
    data, held_out = (
        (setting.preferences, setting.held_out_preferences) if is_preference else (setting.sft, setting.held_out)
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    child = context.Process(target=killable_run, args=(setting.model, data, held_out, output, kind, is_preference))
    child.start()
    return child


def finished(child: ForkServerProcess) -> None:
    child.join(HANG_S)
    assert child.exitcode == 0
    child.close()


def killed_at(child: ForkServerProcess, log: Path, num_bytes: int, delay_s: float) -> bool:
    """Kill it a moment after its log has grown to so many bytes; False if it was done before."""
    deadline = time.monotonic() + HANG_S
    while child.is_alive() and (not log.exists() or log.stat().st_size < num_bytes):
        assert time.monotonic() < deadline, "the run hangs"
        time.sleep(0.001)
    time.sleep(delay_s)  # not to wait for anything: the point of the kill is to be anywhere
    child.kill()
    child.join(HANG_S)
    was_killed = child.exitcode != 0
    child.close()
    return was_killed


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "is_preference", "num_kills"),
    [
        ("lora", False, 3),
        pytest.param("lora", False, 50, marks=pytest.mark.long),
        pytest.param("direft", True, 10, marks=pytest.mark.long),
        pytest.param("loreft", False, 10, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_goes_on_bit_by_bit(
    setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_preference: bool, num_kills: int
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a GPU's driver survives no fork
    whole = tmp_path / "whole"
    finished(started(setting, whole, kind, is_preference))
    log_bytes = (whole / "log.jsonl").stat().st_size
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    same = ["log.jsonl", "run.json", "last/training/state.json", "last/training/state.safetensors"]
    same += [f"best/{path.name}" for path in (whole / "best").iterdir() if path.is_file()]
    kills = 0
    for number in range(2 * num_kills):  # runs that are done before they are killed do not count
        output = tmp_path / f"killed-{number}"
        points = sorted(generator.randrange(log_bytes) for _ in range(min(KILLS_IN_A_RUN, num_kills - kills)))
        for point in points:
            child = started(setting, output, kind, is_preference)
            kills += killed_at(child, output / "log.jsonl", point, generator.random() * 0.05)
        finished(started(setting, output, kind, is_preference))
        for name in same:
            assert (output / name).read_bytes() == (whole / name).read_bytes(), f"seed {seed}: {name}"
        assert {path.name for path in output.iterdir()} == {path.name for path in whole.iterdir()}
        if kills == num_kills:
            return
    pytest.fail(f"seed {seed}: {kills} of {num_kills} runs were killed before their end")
