"""Versions of one adapter that are pushed into workers' memory: what each answers, and where it is."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from support.clusters.running_cluster import RunningCluster
from support.engines.parity import completion_body
from support.waiting import wait_until

NAME = "bot"
HOLDER = "prefill-0"
NEW_TOKENS = 12
MIN_ANSWERS = 4  # of each version while the next one is pushed
BACK_WITHIN_S = 120.0
PROMPT = tuple(range(20, 60))


@dataclass
class Pushed:
    """The cluster, the versions of one adapter, and what each answers."""

    cluster: RunningCluster
    directories: list[Path]  # the first one is stored, the others are pushed
    ids: list[str]
    expected: dict[str, list[int]]  # by revision
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def root(self) -> Path:
        return self.cluster.logs.parent

    def ask(self, reference: str = NAME) -> httpx.Response:
        body = completion_body(reference, PROMPT, max_tokens=NEW_TOKENS)
        return httpx.post(f"{self.cluster.url}/v1/completions", json=body, timeout=120)

    def wait_until_seen(self, version: int) -> None:
        """Wait until requests have been answered by a version several times."""
        wait_until(lambda: self.seen[self.ids[version]] >= MIN_ANSWERS, BACK_WITHIN_S)

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
        answer = httpx.post(url, data={"memory_only": "true"}, files=files, timeout=120)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        assert (told["revision"], told["stored"]) == (self.ids[version], False)
        assert all(isinstance(seconds, float) for seconds in told["workers"].values()), told
        assert set(told["workers"]) == {HOLDER}
        return told

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli.main", "adapters", *words, "--config", str(self.root / "cluster.yaml")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def on_disk(self) -> set[int]:
        """The versions of which a file is anywhere in the cluster's folder: its store, disk caches, scratch folders."""
        names = [path.name for path in self.root.rglob("*")]
        return {number for number, each in enumerate(self.ids) if any(each[7:] in name for name in names)}

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
