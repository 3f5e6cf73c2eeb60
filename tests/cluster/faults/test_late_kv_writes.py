"""A prefill engine writes the KV of a request that has been given up: into nobody else's KV.

Two prefill engines and a decode engine, called as routers call them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.engines.running_engine import RunningEngine, engine_spec, running_engine
from support.waiting import wait_until

from process.free_ports import free_port

pytestmark = pytest.mark.long  # it starts three engines

POOL_TOKENS = 2000  # of decode's KV
LOST_TOKENS = 600  # of the request that is given up
NUM_NEW_TOKENS = 400
WITHIN_S = 60.0
FREED_WITHIN_S = 20.0

_FOLDER = "PRELUDE_TEST_LATE_KV_WRITES"
# Python imports this module in each process of an engine. The module of NIXL's API comes much later.
_SITE = f"""
import importlib.util, os, pathlib, sys, time

FOLDER = pathlib.Path(os.environ["{_FOLDER}"])

def late(transfer):
    def wrapped(agent, handle, *args, **kwargs):
        try:
            (FOLDER / "late").rename(FOLDER / "posting")
        except FileNotFoundError:
            return transfer(agent, handle, *args, **kwargs)
        while not (FOLDER / "go").exists():
            time.sleep(0.002)
        state = transfer(agent, handle, *args, **kwargs)
        (FOLDER / "posted").touch()
        return state
    return wrapped

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "nixl_cu13._api":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_change(module):
            execute(module)
            module.nixl_agent.transfer = late(module.nixl_agent.transfer)
        spec.loader.exec_module = execute_and_change
        return spec

sys.meta_path.insert(0, Finder())
"""


class LateKvWrites:
    """Makes a KV write of engines that start while `environment` is in theirs late: NIXL gets it when the test says so.

    Every check of the engine comes before that: to it the write is under way, as on a slow network.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(_SITE)
        paths = (str(folder / "site"), os.environ.get("PYTHONPATH", ""))
        self.environment = {_FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def begin(self) -> None:
        """From now on: the next write of any of the engines is late, and all that wait for it."""
        for name in ("posting", "posted", "go"):
            (self._folder / name).unlink(missing_ok=True)
        (self._folder / "late").touch()

    def wait_until_posting(self, timeout_s: float) -> None:
        """Wait until an engine is about to post the write."""
        self._wait("posting", timeout_s)

    def end(self, timeout_s: float) -> None:
        """Let the write be posted."""
        (self._folder / "go").touch()
        self._wait("posted", timeout_s)

    def _wait(self, name: str, timeout_s: float) -> None:
        wait_until((self._folder / name).exists, timeout_s)


@dataclass(frozen=True)
class Engines:
    slow: RunningEngine
    prefill: RunningEngine
    decode: RunningEngine
    writes: LateKvWrites

    def ask(self, prefill: RunningEngine, room: Room) -> list[int]:
        """The tokens of an answer; empty if it fails."""
        legs = [threading.Thread(target=room.call, args=(engine,)) for engine in (prefill, self.decode)]
        for leg in legs:
            leg.start()
        for leg in legs:
            leg.join()
        return room.tokens

    def num_tokens_free(self) -> int:
        rank = httpx.get(f"{self.decode.spec.url}/v1/loads", timeout=30).json()["loads"][0]
        assert rank["max_total_num_tokens"] == POOL_TOKENS
        return rank["max_total_num_tokens"] - rank["num_used_tokens"] - rank["num_waiting_reqs"]

    def requests_in(self, queue: str) -> int:
        """The number of requests in one of the decode engine's queues."""
        rank = httpx.get(f"{self.decode.spec.url}/v1/loads", timeout=30).json()["loads"][0]
        return rank["disaggregation"][f"{queue}_reqs"]


class Room:
    """One request to two engines, for all its tokens: `ignore_eos` would also reserve KV for them."""

    def __init__(self, prefill: RunningEngine, prompt: list[int], num_new_tokens: int) -> None:
        lengths = {"min_new_tokens": num_new_tokens, "max_new_tokens": num_new_tokens}
        self.body: dict[str, Any] = {
            "rid": secrets.token_hex(8),
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, **lengths},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": prefill.spec.bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }
        self.tokens: list[int] = []
        self.ended = threading.Event()

    def call(self, engine: RunningEngine) -> None:
        if engine.spec.role == "prefill":
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{engine.spec.url}/generate", json=self.body, timeout=WITHIN_S)
            return
        with httpx.stream("POST", f"{engine.spec.url}/generate", json={**self.body, "stream": True}, timeout=90) as got:
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    self.tokens = json.loads(line.removeprefix("data: ")).get("output_ids", self.tokens)
        self.ended.set()

    def abort(self, *engines: RunningEngine) -> None:
        for engine in engines:
            httpx.post(f"{engine.spec.url}/abort_request", json={"rid": self.body["rid"]}, timeout=30)


@pytest.fixture(scope="module")
def engines(model_dir: Path, tmp_path_factory) -> Iterator[Engines]:
    writes = LateKvWrites(tmp_path_factory.mktemp("late"))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in writes.environment.items():
            patch.setenv(name, value)
        started: dict[str, RunningEngine] = {}

        def start(name: str, role: str, **changes) -> None:
            scratch = tmp_path_factory.mktemp(name)
            spec = engine_spec(role, model_dir, scratch, **changes)
            started[name] = stack.enter_context(running_engine(spec, tmp_path_factory.mktemp(f"{name}-cache")))

        start("slow", "prefill", bootstrap_port=free_port(), chunked_prefill_tokens=1024)  # one write for a prompt
        start("prefill", "prefill", bootstrap_port=free_port())
        start("decode", "decode", max_total_tokens=POOL_TOKENS, adapters=None)
        yield Engines(**started, writes=writes)


def prompt_of(generator: random.Random, num_tokens: int) -> list[int]:
    return [generator.randrange(10, 600) for _ in range(num_tokens)]


def give_up(engines: Engines, prompt: list[int]) -> threading.Thread:
    """A request that both engines are told to abort while its KV is about to be written."""
    lost = Room(engines.slow, prompt, 4)
    engines.writes.begin()
    thread = threading.Thread(target=engines.ask, args=(engines.slow, lost))
    thread.start()
    engines.writes.wait_until_posting(WITHIN_S)
    lost.abort(engines.slow, engines.decode)
    assert lost.ended.wait(FREED_WITHIN_S), "its client waits for the write"
    return thread


def test_late_writes_reach_nobody(engines: Engines):
    generator = random.Random(5)
    assert len(engines.ask(engines.slow, Room(engines.slow, prompt_of(generator, 20), 4))) == 4
    assert len(engines.ask(engines.prefill, Room(engines.prefill, prompt_of(generator, 20), 4))) == 4
    lost = give_up(engines, prompt_of(generator, LOST_TOKENS))
    for _ in range(4):  # the pages after its own: then the pool starts again with the lowest that are free
        filler = Room(engines.prefill, prompt_of(generator, 380), 5)
        assert len(engines.ask(engines.prefill, filler)) == 5
    prompts = [prompt_of(generator, 100) for _ in range(2)]
    rooms = [Room(engines.prefill, prompt, NUM_NEW_TOKENS) for prompt in prompts]
    threads = [threading.Thread(target=engines.ask, args=(engines.prefill, room)) for room in rooms]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(len(room.tokens) >= 3 for room in rooms), WITHIN_S)
    engines.writes.end(WITHIN_S)
    assert max(len(room.tokens) for room in rooms) < NUM_NEW_TOKENS - 20, "the write came too late to harm anybody"
    for thread in (*threads, lost):
        thread.join()
    freed_s = wait_until(lambda: engines.num_tokens_free() == POOL_TOKENS, FREED_WITHIN_S)
    expected = [engines.ask(engines.prefill, Room(engines.prefill, prompt, NUM_NEW_TOKENS)) for prompt in prompts]
    assert [room.tokens for room in rooms] == expected
    print(f"its pages were free {freed_s:.2f} s after the last answer")


@pytest.mark.parametrize("change", ["another token", "one more", "one less", "a page less"])
def test_kv_of_another_prompt(engines: Engines, change: str):
    """The prefill engine reads another prompt than the decode engine was asked for."""
    prompt = prompt_of(random.Random(change), 300)
    others = {
        "another token": [*prompt[:7], prompt[7] ^ 1, *prompt[8:]],
        "one more": [*prompt, 11],
        "one less": prompt[:-1],
        "a page less": prompt[:-100],
    }
    asked, read = Room(engines.prefill, prompt, 4), Room(engines.prefill, others[change], 4)
    read.body |= {key: asked.body[key] for key in ("rid", "bootstrap_room")}
    leg = threading.Thread(target=read.call, args=(engines.prefill,))
    leg.start()
    answer = httpx.post(f"{engines.decode.spec.url}/generate", json=asked.body, timeout=WITHIN_S)
    leg.join()
    assert answer.status_code == 500
    assert "made different tokens of this prompt" in answer.text
    wait_until(lambda: engines.num_tokens_free() == POOL_TOKENS, FREED_WITHIN_S)
    assert len(engines.ask(engines.prefill, Room(engines.prefill, prompt, 4))) == 4


def short_of_pages(
    engines: Engines, prompts: list[list[int]], late_prompt: list[int]
) -> tuple[list[Room], Room, list[threading.Thread]]:
    """Two requests of 520 tokens side by side, and a third that has its pages, but not yet its KV.

    The longer prompt comes second: with fewer tokens generated it is the one to be retracted. On a busy machine the
    first may be far ahead before the second's KV has come, or both before the third has its pages: all begin anew.
    """
    for _ in range(30):
        both = [Room(engines.prefill, prompt, 520) for prompt in prompts]
        late = Room(engines.slow, late_prompt, 286)
        threads = [threading.Thread(target=engines.ask, args=(engines.prefill, room)) for room in both]
        for thread, room in zip(threads, both, strict=True):
            thread.start()
            wait_until(lambda room=room: bool(room.tokens), WITHIN_S)
        if (
            len(both[0].tokens) <= 60
        ):  # else the second has fewer than 420 when pages run out, and needs no more than 820
            engines.writes.begin()
            threads.append(threading.Thread(target=engines.ask, args=(engines.slow, late)))
            threads[-1].start()
            wait_until(lambda: engines.requests_in("decode_transfer_queue") == 1, WITHIN_S)
            if max(len(room.tokens) for room in both) < 300:
                return both, late, threads
            engines.writes.end(WITHIN_S)
        for room in (*both, late):
            room.abort(engines.prefill, engines.slow, engines.decode)
        for thread in threads:
            thread.join()
    pytest.fail("three requests were never in time")


def test_a_retracted_request_and_kv_that_has_arrived_do_not_wait_for_each_other(engines: Engines):
    """Nothing runs but them: one holds the pages that the other needs to go on, and goes on itself once it is asked.

    Of 2,000 tokens 250 are reserved for an answer. Two requests run; a third comes, whose KV is late. They run out of
    pages after some 455 tokens each. One goes on to its 520, and ends. The other needs 855, and the third leaves 820.
    """
    generator = random.Random(8)
    for prefill in (engines.slow, engines.prefill):
        assert len(engines.ask(prefill, Room(prefill, prompt_of(generator, 150), 4))) == 4
    prompts = [prompt_of(generator, length) for length in (10, 150)]
    both, late, threads = short_of_pages(engines, prompts, prompt_of(generator, 930))
    assert both[0].ended.wait(WITHIN_S)
    time.sleep(1.0)
    assert engines.requests_in("decode_retracted_queue") == 1, "nobody waits for pages: this proves nothing"
    engines.writes.end(WITHIN_S)
    assert late.ended.wait(WITHIN_S), "its KV has arrived, and it waits for the retracted request"
    assert both[1].ended.wait(WITHIN_S), "it waits for pages"
    for thread in threads:
        thread.join()
    assert len(late.tokens) == 286
    wait_until(lambda: engines.num_tokens_free() == POOL_TOKENS, FREED_WITHIN_S)
    alone = [engines.ask(engines.prefill, Room(engines.prefill, prompt, 520)) for prompt in prompts]
    assert [room.tokens for room in both] == alone


def test_pages_are_free_when_the_writer_has_gone(engines: Engines):
    lost = give_up(engines, prompt_of(random.Random(6), LOST_TOKENS))
    time.sleep(1.0)
    assert engines.num_tokens_free() < POOL_TOKENS, "its pages are free, though they may be written to"
    for process in processes_of(engines.slow):
        process.kill()
    freed_s = wait_until(lambda: engines.num_tokens_free() == POOL_TOKENS, FREED_WITHIN_S)
    lost.join()
    room = Room(engines.prefill, prompt_of(random.Random(7), 30), 4)
    assert len(engines.ask(engines.prefill, room)) == 4
    print(f"its pages were free {freed_s:.2f} s after the end of the prefill engine")


def processes_of(engine: RunningEngine) -> list[psutil.Process]:
    words = {"--port", str(engine.spec.port)}
    [server] = [each for each in psutil.Process(os.getpid()).children() if words <= set(each.cmdline())]
    return [*server.children(recursive=True), server]
