"""A prefill engine that is started again while its decode engine is stopped: the pair finds together."""

import asyncio
import itertools
import signal
from pathlib import Path

import httpx
import psutil
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases
from support.engines.running_engine import RunningEngine, engine_spec, running_engine
from support.waiting import wait_until

from engine.hooks.report import read_reports
from process.free_ports import free_port

_rooms = itertools.count(1)


def check_answer(prefill: RunningEngine, decode: RunningEngine, case: Case) -> None:
    port, room = prefill.spec.bootstrap_port, next(_rooms)
    at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            body, urls = completion_body(None, case.prompt_ids, **at), [each.spec.url for each in (prefill, decode)]
            _, answer = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for url in urls))
            return answer

    answer = asyncio.run(ask())
    assert answer.status_code == 200, answer.text
    check_tokens(case, answer.json())


def test_the_next_request_finds_a_prefill_engine_that_was_started_again(tmp_path: Path, model: Path, caplog):
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
            wait_until(lambda: "Lost connection with prefill instance" in caplog.text)
            check_answer(prefill, decode, case)
