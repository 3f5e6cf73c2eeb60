"""A prefill engine that is started again while its decode engine is stopped: the pair finds together."""

import asyncio
import itertools
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases
from support.engines.running_engine import RunningEngine, engine_spec, running_engine
from support.waiting import wait_until

from engine.hooks.report import read_reports
from process.free_ports import free_port

_rooms = itertools.count(1)


def check_answer(prefill: RunningEngine, decode: RunningEngine, case: Case, timeout_s: float = 60) -> None:
    """Ask both engines. If that takes too long, abort it at both, and raise."""
    rid, room = f"request-{next(_rooms)}", next(_rooms)
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.spec.bootstrap_port, "bootstrap_room": room}
    urls = [each.spec.url for each in (prefill, decode)]

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=timeout_s) as client:
            body = completion_body(None, case.prompt_ids, rid=rid, **at)
            _, answer = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for url in urls))
            return answer

    try:
        answer = asyncio.run(ask())
    except httpx.TimeoutException:
        for url in urls:
            httpx.post(f"{url}/abort_request", json={"rid": rid}, timeout=60)
        raise
    assert answer.status_code == 200, answer.text
    check_tokens(case, answer.json())


def used_tokens(engine: RunningEngine) -> int:
    return httpx.get(f"{engine.spec.url}/v1/loads", timeout=60).json()["loads"][0]["num_used_tokens"]


def test_the_next_request_finds_a_prefill_engine_that_was_started_again(tmp_path: Path, model: Path):
    """SGLang remembers where it is until three heartbeats have failed, of which a stopped engine makes none."""
    [case] = reference_cases(model, tmp_path, {}, [(None, random_prompts(3, 20)[0])])
    spec = engine_spec("prefill", model, tmp_path / "p", bootstrap_port=free_port())
    decode_spec = engine_spec("decode", model, tmp_path / "d", adapters=None)
    with running_engine(decode_spec, tmp_path / "cache") as decode:
        [report] = [each for each in read_reports(decode_spec.report_dir) if each.process == "scheduler-0"]
        scheduler = psutil.Process(report.pid)
        with running_engine(spec, tmp_path / "cache") as prefill:
            check_answer(prefill, decode, case)
            scheduler.send_signal(signal.SIGSTOP)
        with running_engine(spec, tmp_path / "cache") as prefill:
            scheduler.send_signal(signal.SIGCONT)
            with pytest.raises(httpx.TimeoutException):
                check_answer(prefill, decode, case, timeout_s=5)
            wait_until(lambda: not used_tokens(decode))  # it has found out that whom it asked is gone
            check_answer(prefill, decode, case)
