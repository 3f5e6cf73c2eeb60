"""The unified role: one engine that reads prompts with adapters and answers without, held against the reference.

Kinds: LoRA on all and on few modules, DiReFT, LoReFT, both in one adapter; ranks 1, 8 and 64 in one batch; adapters on
some layers; an adapter for all positions among prefill-only ones; the base model.
"""

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.clusters.running_cluster import sum_of
from support.engines.parity import Case, check_logprobs, check_tokens
from support.engines.running_engine import MODULES, AdapterSlots, engine_spec, running_engine
from support.engines.unified_engine import Unified, check, tokens

from adapters.model.base_model import BaseModel
from engine.hooks.report import read_lacking, read_reports
from engine.hooks.uses import NOT_RESIDENT_STATUS

SLOTS = 4  # fewer than the adapters
CHUNK = 64


@pytest.fixture(scope="module")
def directories(tmp_path_factory, model: Path) -> dict[str, Path]:
    base, root = BaseModel.read(model), tmp_path_factory.mktemp("adapters")
    return {
        "lora": write_random_lora(root / "lora", base, 1),
        "lora-q": write_random_lora(root / "lora-q", base, 2, modules=("q_proj",), rank=1),
        "lora-64": write_random_lora(root / "lora-64", base, 3, rank=64, layers=(0, 2)),
        "direft": write_random_reft(root / "direft", base, 4, rank=8),
        "direft-some": write_random_reft(root / "direft-some", base, 5, rank=1, layers=(1, 3)),
        "loreft": write_random_reft(root / "loreft", base, 6, kind="loreft", rank=4),
        "mixed": write_random_mixed(root / "mixed", base, 8),
        "everywhere": write_random_lora(root / "everywhere", base, 9, config={"prelude": {"positions": "all"}}),
        "everywhere-direft": write_random_reft(root / "everywhere-direft", base, 10, positions="all"),
        "zero": write_random_reft(root / "zero", base, 11, zero=True),
    }


@pytest.fixture(scope="module")
def unified(tmp_path_factory, model: Path, directories: dict[str, Path]):
    scratch = tmp_path_factory.mktemp("e") / "s"
    # It generates more than one token per second, on however busy a machine.
    spec = engine_spec("unified", model, scratch, adapters=AdapterSlots(SLOTS, 64, MODULES), max_events_per_s=1)
    with running_engine(spec, tmp_path_factory.mktemp("cache")) as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        yield Unified(engine, directories, revisions, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def cases(unified: Unified) -> list[Case]:
    """Every adapter, and the base, on prompts of one token, of less than a chunk, exactly one, and several."""
    prompts = [
        (adapter, tokens(count, seed))
        for seed, adapter in enumerate((None, *unified.directories))
        for count in (1, 20, CHUNK, 2 * CHUNK + 30)
    ]
    return unified.cases(prompts)


def test_its_processes_are_forked(unified: Unified):
    """A forked process has its parent's memory layout; a spawned one draws another."""
    pids = [report.pid for report in read_reports(unified.engine.spec.report_dir)]
    starts = {Path(f"/proc/{pid}/maps").read_text().partition("-")[0] for pid in pids}
    assert (len(pids), len(starts)) == (2, 1)


def test_parity_alone(unified: Unified, cases: list[Case]):
    worst = max(check(case, unified.ask(case)) for case in cases)
    print(f"{len(cases)} requests, largest difference of a log-probability {worst:.2e}")


def test_parity_mixed(unified: Unified, cases: list[Case]):
    """All at once, sixteen and more in a batch, of every kind, and again from the prefix cache."""
    shuffled = random.Random(5).sample(cases, len(cases))
    for fields in ({}, {"echo": False, "logprobs": None}):
        for begin in range(0, len(shuffled), 24):
            group = shuffled[begin : begin + 24]
            for case, answer in zip(group, unified.ask_together(group, **fields), strict=True):
                check_tokens(case, answer)
                if not fields:
                    check_logprobs(case, answer)


def test_more_adapters_than_slots_at_once(unified: Unified):
    """Eleven adapters and the base decode at the same time in four slots, on the right KV each."""
    names = (None, *unified.directories)
    cases = unified.cases([(name, tokens(24, 100 + n)) for n, name in enumerate(names)], new_tokens=48)
    answers = unified.ask_together(cases)
    for case, answer in zip(cases, answers, strict=True):
        check(case, answer)
    metrics = httpx.get(f"{unified.engine.spec.url}/metrics").text
    steps = "prelude_engine_adapter_step_seconds"
    assert sum_of(metrics, steps + '_count{step="load"}') >= len(unified.directories)
    assert sum_of(metrics, steps + '_count{step="fill"}') >= len(unified.directories)
    assert sum_of(metrics, steps + '_sum{step="load"}') > 0


def test_an_adapter_that_left_comes_back(unified: Unified):
    """Its slot is free while it is gone, other adapters use it, and its KV still is its own."""
    case, *others = unified.cases([("mixed", tokens(24, 200)), ("lora", tokens(24, 200)), ("direft", tokens(24, 200))])
    check(case, unified.ask(case))
    for _ in range(2):  # the second time it is gone already
        answer = unified.unload("mixed")
        assert answer.status_code == 200 or "does not exist" in answer.text
    refused = httpx.post(f"{unified.engine.spec.url}/v1/completions", json=unified.body(case), timeout=60)
    assert refused.status_code == NOT_RESIDENT_STATUS
    for other in others:
        check(other, unified.ask(other))
    assert unified.engine.load(unified.directories["mixed"]) == unified.revisions["mixed"]
    check(case, unified.ask(case))


class EndedEarlyError(Exception):
    """The machine was too busy to act while an answer ran: nothing was shown."""


def in_time(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it until the answers were slow enough, at most five times."""
    for _ in range(4):
        try:
            return asyncio.run(run())
        except EndedEarlyError:
            pass
    asyncio.run(run())


async def until(unified: Unified, field: str, count: int, asking: asyncio.Task) -> None:
    """Return once the engine's load has the count, which it has only while `asking` runs."""
    async with httpx.AsyncClient(base_url=unified.engine.spec.url, timeout=60) as client:
        while (await client.get("/v1/loads")).json()["loads"][0][field] != count:
            if asking.done():
                raise EndedEarlyError
            await asyncio.sleep(0.01)


async def asked(unified: Unified, case: Case, **fields) -> None:
    """Ask and check the answer, which could end earlier: else SGLang would keep room for all of it."""
    body = unified.body(case, echo=False, logprobs=None, ignore_eos=False, **fields)
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(f"{unified.engine.spec.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    check_tokens(case, answer.json())


async def left(unified: Unified, adapter: str, asking: asyncio.Task) -> None:
    """Unload an adapter while the answer that began with it runs: once its prompt is read."""
    while (answer := await asyncio.to_thread(unified.unload, adapter)).status_code != 200:
        assert "is in use by 1 requests" in answer.text
    if asking.done():
        await asyncio.to_thread(unified.engine.load, unified.directories[adapter])
        raise EndedEarlyError


def test_an_adapter_leaves_once_its_prompt_is_read(unified: Unified):
    """The answer goes on, streamed or not; when it ends, nobody counts it down for the adapter that came back."""
    [case] = unified.cases([("loreft", tokens(24, 210))], new_tokens=600)

    async def run() -> None:
        asking = asyncio.create_task(asked(unified, case))
        await until(unified, "num_running_reqs", 1, asking)
        await left(unified, "loreft", asking)
        url = f"{unified.engine.spec.url}/v1/completions"
        late = await asyncio.to_thread(httpx.post, url, json=unified.body(case), timeout=60)
        assert late.status_code == NOT_RESIDENT_STATUS
        await asyncio.to_thread(unified.engine.load, unified.directories["loreft"])
        if asking.done():
            raise EndedEarlyError
        await asking

    in_time(run)
    check_tokens(case, unified.ask(case, echo=False))
    assert unified.unload("loreft").status_code == 200
    unified.engine.load(unified.directories["loreft"])


def test_an_adapter_for_all_positions_stays_until_its_answer_ends(unified: Unified):
    """An unload is refused, the request goes on; afterwards it may go."""
    [case] = unified.cases([("everywhere", tokens(24, 210))], new_tokens=400)

    async def run() -> None:
        asking = asyncio.create_task(asked(unified, case))
        await until(unified, "num_running_reqs", 1, asking)
        refused = await asyncio.to_thread(unified.unload, "everywhere")
        if asking.done():
            if refused.status_code == 200:
                await asyncio.to_thread(unified.engine.load, unified.directories["everywhere"])
            raise EndedEarlyError
        assert refused.status_code == 400
        assert "is in use by 1 requests" in refused.text
        await asking

    in_time(run)
    assert unified.unload("everywhere").status_code == 200
    unified.engine.load(unified.directories["everywhere"])


def test_a_prompt_is_counted_while_it_is_computed(unified: Unified):
    """It has left the queue and generates nothing: SGLang itself counts it nowhere, and a drain would not wait."""
    body = {"model": "demo", "prompt": list(tokens(1900, 211)), "max_tokens": 1}

    async def run() -> set[int]:
        async with httpx.AsyncClient(timeout=120) as client:
            asking = asyncio.create_task(client.post(f"{unified.engine.spec.url}/v1/completions", json=body))
            seen = set()
            while not asking.done():
                load = (await client.get(f"{unified.engine.spec.url}/v1/loads")).json()["loads"][0]
                seen.add(load["num_running_reqs"])
            assert (await asking).status_code == 200
            return seen

    assert 1 in asyncio.run(run())


def test_clients_that_leave_use_nothing(unified: Unified):
    """At any moment, before and after the scheduler has heard of them, or refused: all can be unloaded."""
    names = ("lora", "direft", "mixed", "lora-64")
    url, generator = f"{unified.engine.spec.url}/v1/completions", random.Random(5)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        num_tokens = generator.choice((3, 20, 3 * CHUNK))
        body = {"model": "demo", "prompt": list(tokens(num_tokens, 5000 + number)), "max_tokens": 400, "stream": True}
        body["lora_path"] = unified.revisions[names[number % len(names)]]
        if number % 10 == 9:
            body["prompt"] = [11] * 100_000  # longer than the engine takes
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(generator.choice((0.002, 0.01, 0.03, 0.1, 0.4))):
                async with client.stream("POST", url, json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client:
            for first in range(0, 160, 16):
                await asyncio.gather(*(leave(client, number) for number in range(first, first + 16)))

    asyncio.run(run())
    for name in names:
        deadline = time.monotonic() + 60
        while (answer := unified.unload(name)).status_code != 200 and time.monotonic() < deadline:
            assert "is in use by" in answer.text
            time.sleep(0.1)
        assert answer.status_code == 200, f"{name}: {answer.text}"
    cases = unified.cases([(name, tokens(12, 6000)) for name in names])
    for case in cases:
        unified.engine.load(unified.directories[case.adapter])
        check(case, unified.ask(case))


def test_prefix_is_shared_within_an_adapter_only(unified: Unified):
    prompt = tokens(100, 300)
    cases = unified.cases([(name, prompt) for name in ("direft", "lora", None, "mixed")])
    plain = {"echo": False, "logprobs": None}
    for case in cases:
        answer = unified.ask(case, **plain)
        check_tokens(case, answer)
        assert not (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
    for case in cases:
        answer = unified.ask(case, **plain)
        check_tokens(case, answer)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


@pytest.mark.parametrize("adapter", [None, "lora"])
def test_a_tenant_finds_no_prefix_of_another(unified: Unified, adapter: str | None):
    """Namespaces as the router makes them: a probe by another tenant's name finds nothing, and the first still all."""
    prompt = tokens(100, 800)

    def num_cached(namespace: str) -> int:
        body = unified.body(Case(adapter, "probe", prompt, {"tokens": [0]}), echo=False, logprobs=None)
        answer = httpx.post(
            f"{unified.engine.spec.url}/v1/completions", json=body | {"extra_key": namespace}, timeout=120
        )
        assert answer.status_code == 200, answer.text
        return (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    assert num_cached("acme|") == 0
    assert [num_cached(namespace) for namespace in ("beta|", "acm|", "acmee|", "*|", "ACME|")] == [0] * 5
    assert num_cached("acme|") == len(prompt) - 1


@pytest.mark.parametrize("adapter", ["lora", "direft", "everywhere", None])
def test_follow_up_turn(unified: Unified, adapter: str | None):
    """The answer of a turn is prompt in the next, hence adapted: the KV that decode wrote for it is not reused."""
    plain = {"echo": False, "logprobs": None}
    [first] = unified.cases([(adapter, tokens(40, 400))], new_tokens=32)
    check_tokens(first, unified.ask(first, **plain))
    grown = (*first.prompt_ids, *first.reference["tokens"], *tokens(7, 401))
    [second] = unified.cases([(adapter, grown)])
    answer = unified.ask(second, **plain)
    check_tokens(second, answer)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    # Where decode computed what a prompt would have, its KV is reused as ever: the last token's was never written.
    expected = 40 if adapter in ("lora", "direft") else 40 + 31
    assert cached == expected


def test_two_choices_are_two_requests(unified: Unified):
    """The engine cannot tell which of several choices is done with its adapter; routers send one request for each."""
    [case] = unified.cases([("mixed", tokens(50, 500))])
    url, body = f"{unified.engine.spec.url}/v1/completions", unified.body(case, n=2, echo=False, logprobs=None)
    refused = httpx.post(url, json=body, timeout=60)
    assert refused.status_code == 400
    assert "n above 1 cannot be used with an adapter" in refused.text
    for answer in unified.ask_together([case, case], echo=False, logprobs=None):
        check_tokens(case, answer)
    assert unified.unload("mixed").status_code == 200  # the refused one does not count as using it
    unified.engine.load(unified.directories["mixed"])


def test_busy_engines_stream_fewer_events(unified: Unified):
    """Up to eight tokens per event, and nothing is lost: text, log-probabilities, usage.

    That first tokens are not held back is in test_bounds_hooks.py: here a late server sends the next ones with them.
    """
    [case] = unified.cases([("lora", tokens(30, 650))], new_tokens=200)
    whole = unified.ask(case, echo=False, logprobs=1)
    check_tokens(case, whole)
    body = unified.body(case, echo=False, logprobs=1, stream=True, stream_options={"include_usage": True})
    with httpx.stream("POST", f"{unified.engine.spec.url}/v1/completions", json=body, timeout=60) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    *parts, usage = [json.loads(line) for line in lines]
    choices = [part["choices"][0] for part in parts]
    counts = [len(choice["logprobs"]["tokens"]) if choice["logprobs"] else 0 for choice in choices]
    assert usage["usage"]["completion_tokens"] == sum(counts) == 200
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    found = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert found == pytest.approx(whole["choices"][0]["logprobs"]["token_logprobs"], abs=1e-4)
    # How many fewer depends on how fast the machine is: at 2 tokens per second half as many, from 8 on an eighth.
    # A late server joins events that have come meanwhile.
    assert max(counts) > 1, counts
    assert statistics.median(counts) <= 8, counts
    assert len(counts) < 150, counts


@pytest.fixture(scope="module")
def tight(tmp_path_factory, model: Path, directories: dict[str, Path]):
    """Little room for KV. `tests/cluster/answers/test_unified_worker.py` has one behind a router."""
    spec = engine_spec(
        "unified",
        model,
        tmp_path_factory.mktemp("e") / "s",
        adapters=AdapterSlots(SLOTS, 64, MODULES),
        max_total_tokens=900,
        # Admit more than will fit, so that requests are retracted.
        extra_arguments=("--schedule-conservativeness", "0.0"),
    )
    with running_engine(spec, tmp_path_factory.mktemp("cache")) as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        yield Unified(engine, directories, revisions, tmp_path_factory.mktemp("reference"))


def test_a_request_that_waits_keeps_its_adapter(tight: Unified):
    """For KV memory, behind an answer whose adapter may go."""
    first, second = tight.cases([("lora", tokens(450, 700)), ("direft", tokens(470, 701))], new_tokens=200)

    async def run() -> None:
        asking = asyncio.create_task(asked(tight, first))
        await until(tight, "num_running_reqs", 1, asking)
        waiting = asyncio.create_task(asked(tight, second))
        await until(tight, "num_waiting_reqs", 1, asking)
        refused = await asyncio.to_thread(tight.unload, "direft")
        assert "is in use by 1 requests" in refused.text
        await left(tight, "lora", asking)
        await asyncio.gather(asking, waiting)

    in_time(run)
    tight.engine.load(tight.directories["lora"])


def test_a_retracted_request_waits_until_its_adapter_is_loaded_again(tight: Unified):
    """And holds up no other. This test does what the agent does."""
    names = (None, "lora")
    cases = tight.cases([(name, tokens(30, 710 + n)) for n, name in enumerate(names)], new_tokens=600)
    [other] = tight.cases([("mixed", tokens(12, 720))])
    lacking = {"retracted": tight.revisions["lora"]}

    async def run() -> None:
        answers = [asyncio.create_task(asked(tight, cases[0]))]
        await until(tight, "num_running_reqs", 1, answers[0])
        answers.append(asyncio.create_task(asked(tight, cases[1], rid="retracted")))  # it has fewer tokens
        await until(tight, "num_running_reqs", 2, answers[0])
        await left(tight, "lora", answers[1])
        async with asyncio.timeout(120):
            while read_lacking(tight.engine.spec.report_dir) != lacking:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asked(tight, other)
        await answers[0]
        assert read_lacking(tight.engine.spec.report_dir) == lacking
        await asyncio.to_thread(tight.engine.load, tight.directories["lora"])
        await answers[1]
        assert read_lacking(tight.engine.spec.report_dir) == {}

    in_time(run)
