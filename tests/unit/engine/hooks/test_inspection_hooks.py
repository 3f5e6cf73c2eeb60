"""Which requests an engine's load report counts: a prompt that is being computed, once."""

import types
from pathlib import Path

import pytest

from engine.hooks import inspection
from engine.hooks.report import REPORT_DIR_VARIABLE
from engine.vital_signs import read_vitals


class Scheduler:
    """Its queues, in the words of SGLang."""

    def __init__(self) -> None:
        self.running: list[object] = []
        self.sending: list[object] = []
        self.published: list[tuple[int, int]] = []

    def loads(self) -> tuple[int, int]:
        transfers = types.SimpleNamespace(prefill_inflight_queue_reqs=len(self.sending))
        sglangs = types.SimpleNamespace(
            num_running_reqs=len(self.running), num_waiting_reqs=0, disaggregation=transfers
        )
        inquirer = types.SimpleNamespace(get_running_batch=lambda: types.SimpleNamespace(reqs=self.running))
        counted = inspection.count_prefill(sglangs, inquirer)
        return counted.num_running_reqs, counted.num_waiting_reqs

    def publish_load_snapshot(self, force: bool) -> None:
        assert force
        self.published.append(self.loads())


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch) -> Scheduler:
    monkeypatch.setenv(REPORT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(inspection, "_rank", lambda: 0)
    monkeypatch.setattr(inspection, "_prefilling", {})
    for cached in (inspection._vitals, inspection._own_vitals):
        cached.cache_clear()
    return Scheduler()


def request() -> types.SimpleNamespace:
    """It has a token once its prompt is computed."""
    return types.SimpleNamespace(output_ids=[], finished=lambda: False)


def batch(*requests: object, is_prompt: bool = True) -> types.SimpleNamespace:
    return types.SimpleNamespace(reqs=list(requests), forward_mode=types.SimpleNamespace(is_extend=lambda: is_prompt))


def test_a_prompt_is_counted_from_its_batch_to_its_result(scheduler: Scheduler, tmp_path: Path):
    a, b, c = request(), request(), request()
    prompts = batch(a, b, c)
    seen = inspection.publish_prefill(lambda scheduler, _batch: scheduler.loads(), scheduler, prompts)
    assert (scheduler.published, seen) == ([(3, 0)], (3, 0))
    assert read_vitals(tmp_path, "scheduler-0").num_batches == 1
    b.output_ids.append(5)
    c.finished = lambda: True  # aborted
    assert scheduler.loads() == (1, 0)
    a.output_ids.append(5)
    assert scheduler.loads() == (0, 0)
    scheduler.sending = [a, b]  # SGLang has it in a queue that it does not count
    assert scheduler.loads() == (0, 2)


def test_it_is_counted_once_when_it_generates_already(scheduler: Scheduler):
    """An overlapping scheduler merges a batch before it has processed its results."""
    a = request()
    prompts = batch(a)
    inspection.publish_prefill(lambda *_: None, scheduler, prompts)
    scheduler.running = [a]
    assert scheduler.loads() == (1, 0)
    a.output_ids.append(5)
    assert scheduler.loads() == (1, 0)


def test_batches_of_answers_are_left_to_sglang(scheduler: Scheduler):
    inspection.publish_prefill(lambda *_: None, scheduler, batch(request(), is_prompt=False))
    assert (scheduler.published, scheduler.loads()) == ([], (0, 0))
