"""Engines that are prefill and decode in turns: after each change all pairs give the reference's answers."""

import asyncio
import contextlib
import itertools
import os
import random
import time
from pathlib import Path

import httpx
import psutil
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases
from support.engines.running_engine import RunningEngine, engine_spec, running_engine

from adapters.model.base_model import BaseModel
from engine.hooks.report import ProcessReport, read_reports
from process.free_ports import free_port

_rooms = itertools.count(1)


class Switching:
    """One engine, the role that it has now, and the adapters that it has loaded."""

    def __init__(self, engine: RunningEngine) -> None:
        self.engine, self.role = engine, "prefill"
        self.revisions: dict[str, str] = {}

    @property
    def report(self) -> ProcessReport:
        [found] = [r for r in read_reports(self.engine.spec.report_dir) if r.process == "scheduler-0"]
        return found

    def load(self, directories: dict[str, Path]) -> None:
        self.revisions = {name: self.engine.load(directory) for name, directory in directories.items()}

    def unload(self) -> None:
        for revision in self.revisions.values():
            assert self.post("unload_lora_adapter", {"lora_name": revision})["success"]
        self.revisions = {}

    def change(self) -> None:
        """Give it the other role."""
        role = "decode" if self.role == "prefill" else "prefill"
        answer = self.post("pd_role_switch", {"new_role": role, "decode_cuda_graph_memory_gb": 0})
        assert answer["success"], answer
        self.role = role

    def post(self, path: str, body: dict) -> dict:
        return httpx.post(f"{self.engine.spec.url}/{path}", json=body, timeout=60).json()


@pytest.fixture(scope="module")
def directories(tmp_path_factory, model: Path) -> dict[str, Path]:
    base, root = BaseModel.read(model), tmp_path_factory.mktemp("adapters")
    return {"lora": write_random_lora(root / "lora", base, 1), "direft": write_random_reft(root / "direft", base, 4)}


@pytest.fixture(scope="module")
def engines(tmp_path_factory, model: Path):
    cache = tmp_path_factory.mktemp("cache")

    def running(name: str):
        scratch = tmp_path_factory.mktemp(name) / "s"
        return running_engine(engine_spec("switching", model, scratch, bootstrap_port=free_port()), cache)

    with running("a") as a, running("b") as b, running("c") as c:
        yield [Switching(a), Switching(b), Switching(c)]


@pytest.fixture(scope="module")
def cases(tmp_path_factory, model: Path, directories: dict[str, Path]) -> list[Case]:
    """Two prompts, of less and of more than a chunk, under each adapter and none."""
    asked = [(name, ids) for ids in random_prompts(7, 20, 150) for name in (None, *directories)]
    return reference_cases(model, tmp_path_factory.mktemp("reference"), directories, asked)


def check_answers(prefill: Switching, decode: Switching, cases: list[Case]) -> int:
    """All cases at once, each sent to both engines; how many tokens the prefix cache had."""

    async def answers_to(client: httpx.AsyncClient, case: Case) -> list[dict]:
        at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.engine.spec.bootstrap_port}
        body = completion_body(None, case.prompt_ids, **at, bootstrap_room=next(_rooms))
        adapted = body if case.adapter is None else {**body, "lora_path": prefill.revisions[case.adapter]}
        sent = ((prefill, adapted), (decode, body))
        posts = (client.post(f"{each.engine.spec.url}/v1/completions", json=what) for each, what in sent)
        answers = await asyncio.gather(*posts)
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
        return [answer.json() for answer in answers]

    async def run() -> list[list[dict]]:
        async with httpx.AsyncClient(timeout=30) as client:  # less than SGLang's own limits, after which it tries again
            return await asyncio.gather(*(answers_to(client, case) for case in cases))

    num_cached = 0
    for case, (read, answer) in zip(cases, asyncio.run(run()), strict=True):
        check_tokens(case, answer)
        num_cached += (read["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return num_cached


def change_roles(engines: list[Switching], directories: dict[str, Path], cases: list[Case], times: int) -> None:
    """Change random engines, so that both roles are there; check all pairs after each change."""
    print(f"seed {(seed := random.randrange(1 << 30))}")
    generator, parts = random.Random(seed), []
    for engine in engines:
        if engine.role == "prefill" and not engine.revisions:
            engine.load(directories)
    for _ in range(times):
        roles = [engine.role for engine in engines]
        changing = generator.choice([engine for engine in engines if roles.count(engine.role) > 1])
        began = time.monotonic()
        changing.unload()
        unloaded = time.monotonic()
        changing.change()
        parts.append((unloaded - began, time.monotonic() - unloaded))
        assert (changing.report.role, changing.report.num_adapters) == (changing.role, 0)
        if changing.role == "prefill":
            changing.load(directories)
        else:
            refused = changing.post("load_lora_adapter", {"lora_name": "sha256:1", "lora_path": "/nowhere"})
            assert "a decode engine holds no adapters" in refused["error_message"]
        for prefill, decode in itertools.permutations(engines, 2):
            if (prefill.role, decode.role) == ("prefill", "decode"):
                num_cached = check_answers(prefill, decode, cases)
                assert prefill is not changing or not num_cached, "the prefix cache outlived a change"
                changing = None  # whose first requests these were
    for what, seconds in zip(("unloads", "switches"), map(sorted, zip(*parts, strict=True)), strict=True):
        print(f"{times} {what}: {seconds[0]:.3f} to {seconds[-1]:.3f} s, half within {seconds[times // 2]:.3f} s")


def resources(engine: Switching) -> tuple[int, int, int]:
    """Threads, open files and resident megabytes of its scheduler."""
    process = psutil.Process(engine.report.pid)
    return process.num_threads(), process.num_fds(), process.memory_info().rss >> 20


def test_answers_after_each_change(engines, directories, cases):
    engines[2].change()  # all start as prefill
    change_roles(engines, directories, cases, 20)


@pytest.mark.long
def test_a_thousand_changes(engines, directories, cases):
    before = [resources(engine) for engine in engines]
    change_roles(engines, directories, cases, int(os.environ.get("PRELUDE_TEST_ROLE_CHANGES", "1000")))
    for (threads, files, megabytes), engine in zip(before, engines, strict=True):
        now = resources(engine)
        print(f"threads {threads} -> {now[0]}, files {files} -> {now[1]}, megabytes {megabytes} -> {now[2]}")
        assert now[0] <= threads + 8
        assert now[1] <= files + 64  # 115 to 154, by role and connections; one kept at each change would be 333 more
        assert now[2] <= megabytes + 100


def test_adapters_leave_before_an_engine_decodes(engines, directories):
    """The last test: such an engine ends, and its agent starts it again."""
    engine = next(each for each in engines if each.role == "prefill")
    if not engine.revisions:
        engine.load(directories)
    with contextlib.suppress(httpx.HTTPError):  # SGLang's scheduler ends, at times before its answer is sent
        answer = engine.post("pd_role_switch", {"new_role": "decode", "decode_cuda_graph_memory_gb": 0})
        assert not answer["success"]
        assert "a decode engine holds no adapters; unload sha256:" in answer["message"]
