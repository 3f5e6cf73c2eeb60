"""A unified worker whose host memory has room for one adapter, and whose KV memory is small: adapters come and go
while answers that began with them run. A cluster of its own.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.clusters.running_cluster import RunningCluster, running_cluster, sum_of
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases
from support.waiting import wait_until

from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.packed import write_packed
from prefill_worker.residency.tiers.host_memory import room_bytes

# Two answers begin, and do not fit. SGLang lets the second begin while it would fit as a whole beside what the first
# has so far, 440 tokens of it; ahead by 460, the first would end before the pool is full.
POOL_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 1400, 30, 900
LOADS = 'prelude_worker_adapter_loads_total{result="ok"'


@pytest.fixture(scope="module")
def small(model_dir: Path, adapters: dict[str, Path], tmp_path_factory) -> Iterator[RunningCluster]:
    base, packed = BaseModel.read(model_dir), tmp_path_factory.mktemp("packed") / "a0"
    write_packed(read_adapter(adapters["a0"], base, Limits()), base, "float32", packed)
    # Admits more than will fit, so that requests are retracted.
    engine = {"max_total_tokens": POOL_TOKENS, "extra_arguments": ["--schedule-conservativeness", "0.0"]}
    with running_cluster(
        tmp_path_factory.mktemp("small"),
        model_dir,
        {name: adapters[name] for name in ("a0", "a1")},
        workers={"unified-0": {"role": "unified", "engine": engine}},
        residency={"host_bytes": room_bytes(packed.stat().st_size), "disk_bytes": 0},
    ) as cluster:
        yield cluster


def test_an_adapter_leaves_while_its_answer_runs_and_comes_back_for_a_retraction(
    small: RunningCluster, adapters: dict[str, Path], tmp_path: Path
):
    prompts = random_prompts(5, PROMPT_TOKENS, PROMPT_TOKENS)
    base, adapted = reference_cases(
        small.model_dir, tmp_path, adapters, zip((None, "a0"), prompts, strict=True), NEW_TOKENS
    )
    [other] = reference_cases(small.model_dir, tmp_path, adapters, [("a1", prompts[0])])

    description = small.describe("unified-0")
    headers = {"authorization": f"Bearer {description.engine_key}"}

    def num_running() -> int:
        loads = httpx.get(f"{description.engine_url}/v1/loads", headers=headers).json()
        return loads["loads"][0]["num_running_reqs"]

    def num_loads() -> float:
        return sum_of(httpx.get(f"{small.worker_url('unified-0')}/metrics").text, LOADS)

    def num_retracted() -> float:
        metrics = small.ask_engine("unified-0", "GET", "/metrics").text
        return sum_of(metrics, "sglang:num_retracted_requests_total")

    def ask(case: Case) -> None:
        # For a request of a fixed length SGLang keeps the room that it will need: this could end earlier.
        num_tokens = len(case.reference["tokens"])
        body = completion_body(case.adapter, case.prompt_ids, max_tokens=num_tokens, ignore_eos=False)
        answer = httpx.post(f"{small.url}/v1/completions", json=body, timeout=180)
        assert answer.status_code == 200, answer.text
        check_tokens(case, answer.json())

    running: list[Future[None]] = []

    def have_begun() -> bool:
        return num_running() == len(running) or any(answer.done() for answer in running)

    for _ in range(5):
        ask(other)  # whose adapter has the room now
        loads, retracted = num_loads(), num_retracted()
        running.clear()
        with ThreadPoolExecutor(2) as threads:
            for case in (base, adapted):  # the second is retracted: it has fewer tokens
                running.append(threads.submit(ask, case))
                wait_until(have_begun)
            ask(other)  # in the room of the first adapter
            seen = num_loads() - loads, num_retracted() - retracted
            is_in_time = not any(answer.done() for answer in running)
            for answer in running:
                answer.result()
        if is_in_time:
            break
    else:
        pytest.fail("they always ended early: this proved nothing")
    assert seen == (2, 0)
    assert num_retracted() > retracted, "nothing was retracted: this proved nothing"
    assert num_loads() - loads == 3  # once more for the retraction
