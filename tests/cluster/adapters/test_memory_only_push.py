"""Revisions pushed into workers' memory only: answers are theirs, no disk has them, and they end with the workers.

A pair of its own; pushes to several workers are in tests/unit/router.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.engines.parity import completion_body
from support.engines.reference_answers import run_reference

from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of

NAME = "bot"
HOLDERS = ("prefill-0",)
NEW_TOKENS = 12
MIN_ANSWERS = 4  # of each version while the next one is pushed
BACK_WITHIN_S = 120.0
PROMPT = tuple(range(20, 60))


@dataclass
class Pushed:
    """The cluster, the versions of one adapter, and what each answers."""

    cluster: RunningCluster
    root: Path
    directories: list[Path]  # the first one is stored, the others are pushed
    ids: list[str]
    expected: dict[str, list[int]]  # by revision
    seen: Counter[str] = field(default_factory=Counter)

    def ask(self, reference: str = NAME) -> httpx.Response:
        body = completion_body(reference, PROMPT, max_tokens=NEW_TOKENS)
        return httpx.post(f"{self.cluster.url}/v1/completions", json=body, timeout=60)

    def wait_until_seen(self, version: int) -> None:
        """Wait until requests have been answered by a version several times."""
        deadline = time.monotonic() + BACK_WITHIN_S
        while self.seen[self.ids[version]] < MIN_ANSWERS:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def check(self, answer: httpx.Response) -> int:
        """The version of an answer, which is the right one's."""
        assert answer.status_code == 200, answer.text
        revision = answer.headers["x-prelude-revision"]
        assert answer.json()["choices"][0]["token_ids"] == self.expected[revision], revision
        self.seen[revision] += 1
        return self.ids.index(revision)

    def push(self, version: int) -> dict[str, Any]:
        directory = self.directories[version]
        files = [("file", (each.name, each.read_bytes())) for each in sorted(directory.iterdir())]
        url = f"{self.cluster.url}/v1/adapters/{NAME}/push"
        answer = httpx.post(url, data={"memory_only": "true"}, files=files, timeout=60)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["revision"], told["stored"]) == (self.ids[version], False)
        assert all(isinstance(seconds, float) for seconds in told["workers"].values()), told
        assert set(told["workers"]) == set(HOLDERS)
        return told

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", "adapters", *words, "--config", str(self.root / "cluster.yaml")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def on_disk(self) -> set[int]:
        """The versions of which a file is anywhere in the cluster's folder: its store, disk caches, scratch folders."""
        names = [path.name for path in self.root.rglob("*")]
        return {number for number, each in enumerate(self.ids) if any(each[7:] in name for name in names)}

    def in_memory_only(self) -> list[float]:
        """How many such adapters the workers say that they have."""
        found = []
        for name in HOLDERS:
            page = httpx.get(f"{self.cluster.worker_url(name)}/metrics").text
            line = next(each for each in page.splitlines() if each.startswith("prelude_worker_memory_only_adapters{"))
            found.append(float(line.split()[-1]))
        return found

    @contextmanager
    def traffic(self) -> Iterator[None]:
        """Requests meanwhile, which are answered rightly, and never by an older version than the one before."""
        stop, failures = threading.Event(), []

        def run() -> None:
            latest = 0
            while not stop.is_set():
                try:
                    version = self.check(self.ask())
                    assert version >= latest, f"version {version} after {latest}"
                    latest = version
                except (AssertionError, httpx.HTTPError, ValueError) as error:  # of a thread, told at the end
                    failures.append(error)
                    return

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failures == []


@pytest.fixture(scope="module")
def pushed(model_dir: Path, tmp_path_factory) -> Iterator[Pushed]:
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("memory-only")
    sources = tmp_path_factory.mktemp("versions")  # not in the folder that is searched for them
    directories = [write_random_lora(sources / f"v{seed}", base, 50 + seed, rank=8) for seed in range(3)]
    directories.append(write_random_reft(sources / "v3", base, 53, rank=4))
    ids = [revision_id_of(read_adapter(path, base, Limits())) for path in directories]
    requests = [{"adapter": path, "prompt_ids": PROMPT, "max_new_tokens": NEW_TOKENS} for path in directories]
    answers = run_reference(model_dir, requests, sources)
    assert len({tuple(answer["tokens"]) for answer in answers}) == len(directories)
    expected = {each: answer["tokens"] for each, answer in zip(ids, answers, strict=True)}
    with running_cluster(
        root,
        model_dir,
        {NAME: directories[0]},
        router={"port": 0, "management": True},
        store={"url": f"file://{root}/store"},
    ) as cluster:
        yield Pushed(cluster, root, directories, ids, expected)


def test_pushed_twice_in_a_row_under_traffic(pushed: Pushed):
    assert pushed.check(pushed.ask()) == 0
    body = completion_body(NAME, PROMPT, max_tokens=300, stream=True, logprobs=None)
    with httpx.stream("POST", f"{pushed.cluster.url}/v1/completions", json=body, timeout=120) as running:
        assert running.status_code == 200
        lines = running.iter_lines()
        next(lines)
        with pushed.traffic():
            for version in (1, 2):
                pushed.wait_until_seen(version - 1)  # however slow the machine is
                told = pushed.push(version)
                assert told["number"] == version + 1
                for _ in range(3):
                    assert pushed.check(pushed.ask()) == version
            pushed.wait_until_seen(2)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert running.headers["x-prelude-revision"] == pushed.ids[0]  # what was in flight ended on the old one
    assert pushed.check(pushed.ask(f"{NAME}@r1")) == 0
    assert pushed.check(pushed.ask(f"{NAME}@r2")) == 1  # superseded, and still in memory
    assert min(pushed.seen[each] for each in pushed.ids[:3]) >= MIN_ANSWERS
    assert pushed.in_memory_only() == [2]


def test_engines_that_are_killed_get_it_again(pushed: Pushed):
    """From their agents' memory. Until then requests are told to come again, not that it is gone."""
    old = {name: pushed.cluster.engine(name) for name in HOLDERS}
    for engine in old.values():
        engine.kill()
    statuses: Counter[int] = Counter()
    deadline = time.monotonic() + BACK_WITHIN_S
    while (answer := pushed.ask()).status_code != 200 and time.monotonic() < deadline:
        statuses[answer.status_code] += 1
        time.sleep(0.2)
    assert pushed.check(answer) == 2
    assert statuses, "the engines were not missed"
    assert statuses.keys() <= {502, 503}
    pushed.cluster.wait_ready(BACK_WITHIN_S)
    for name, engine in old.items():
        assert pushed.cluster.engine(name).pid != engine.pid
    with pushed.traffic():
        time.sleep(1)
    assert pushed.on_disk() == {0}


def test_agents_that_end_take_it_along(pushed: Pushed):
    """Requests are told that it is gone, an earlier one is served after rollbacks, and the push can be made again."""
    agents = [pushed.cluster.process(name) for name in HOLDERS]
    for agent in agents:
        agent.kill()
    time.sleep(1)
    away = pushed.ask()
    assert away.status_code in (502, 503), away.text
    assert "retry-after" in away.headers
    pushed.cluster.wait_ready(BACK_WITHIN_S)
    answer = pushed.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "adapter_revision_gone"), answer.text
    assert "retry-after" not in answer.headers
    assert f"`prelude adapters rollback {NAME}`" in answer.json()["error"]["message"]
    assert pushed.check(pushed.ask(f"{NAME}@r1")) == 0
    for number in (2, 1):
        moved = pushed.command("rollback", NAME)
        assert f"{NAME}@latest -> r{number}" in moved.stdout, moved.stderr
        heard_by = time.monotonic() + 30  # when the router has heard of it
        while (status := pushed.ask().status_code) == 410 and number == 1 and time.monotonic() < heard_by:
            time.sleep(0.2)
        assert status == (200 if number == 1 else 410)  # r2 was in the same memory
    assert pushed.check(pushed.ask()) == 0
    assert pushed.push(3)["number"] == 4
    assert pushed.check(pushed.ask()) == 3
    assert pushed.push(1)["number"] == 2
    assert pushed.check(pushed.ask()) == 1
    assert pushed.on_disk() == {0}
