"""The commands of docs/adapters.md, "Backups", on a real pair: back up under load, lose everything, restore, serve.

A cluster of its own.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.waiting import wait_until

from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Scope
from adapters.store import open_store

ROOT = Path(__file__).parents[3]
REFERENCES = ("bot", "bot@live", "bot@r1", "other@canary")
BODY = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def commands_of_page() -> list[list[str]]:
    """The words after `prelude` of each command of the section."""
    section = (ROOT / "docs" / "adapters.md").read_text().split("## Backups\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return [line.partition("#")[0].split()[1:] for line in block.splitlines() if line.startswith("prelude ")]


class Desk:
    """Who operates the cluster of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, *words: object) -> Any:
        """What `prelude …` prints as JSON; it has to succeed."""
        command = [
            sys.executable,
            "-m",
            "cli.main",
            *map(str, words),
            "--config",
            self._folder / "cluster.yaml",
            "--json",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout)

    @contextlib.contextmanager
    def catalog(self) -> Iterator[SqlCatalog]:
        file = self._folder / ".prelude" / "catalog.db"
        file.parent.mkdir(exist_ok=True)
        catalog = SqlCatalog.open(f"sqlite:///{file}")
        try:
            yield catalog
        finally:
            catalog.close()


class Client:
    """One tenant at the router."""

    def __init__(self, cluster: RunningCluster, key: str) -> None:
        self._url, self._headers = cluster.url, {"authorization": f"Bearer {key}"}

    def answer(self, adapter: str) -> tuple[str, str]:
        """The revision and the text."""
        body = {**BODY, "adapter": f"acme/{adapter}"}
        answer = httpx.post(f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-prelude-revision"], answer.json()["choices"][0]["text"]

    def usage(self) -> list[dict[str, Any]]:
        parameters = {"group_by": "hour,key,adapter,revision"}
        answer = httpx.get(f"{self._url}/v1/usage", params=parameters, headers=self._headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def usage_of(self, num_requests: int) -> list[dict[str, Any]]:
        """Once so many requests have been written."""
        wait_until(lambda: sum(row["requests"] for row in self.usage()) >= num_requests)
        return self.usage()


class Load:
    """Requests, imports, moves and deletions, until it is stopped; what fails ends it."""

    def __init__(self, desk: Desk, client: Client, adapters: list[Path]) -> None:
        self._desk, self._client, self._adapters = desk, client, adapters
        self._enough = threading.Event()
        self.num_rounds = 0

    def run(self) -> None:
        while not self._enough.is_set():
            number = self.num_rounds
            name = f"acme/busy{number % 2}"
            self._desk.run("adapters", "import", name, self._adapters[number % 2], "--tag", f"at{number % 3}")
            self._client.answer(f"busy{number % 2}")
            self._desk.run("adapters", "delete", name)
            self._desk.run("adapters", "restore", name)
            self.num_rounds += 1

    def stop(self) -> None:
        self._enough.set()


def test_the_drill(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    desk, backup = Desk(tmp_path), tmp_path / "elsewhere"
    first, second, restoring, signing, checking = commands_of_page()
    assert first[:2] == second[:2] == ["catalog", "backup"]
    with desk.catalog() as catalog:  # a router with keys starts with one
        _, key = catalog.keys.create("acme", "app", {Scope.INFER, Scope.ADAPTERS_READ}, expires_at=None, by="test")
        _, other = catalog.keys.create("acme", "load", {Scope.INFER}, expires_at=None, by="test")
        revoked, lost = catalog.keys.create("acme", "lost", {Scope.INFER}, expires_at=None, by="test")
        catalog.keys.revoke(revoked.key_id)
    sections = {"router": {"port": 0, "auth": {}}}
    with running_cluster(tmp_path, model_dir, {}, **sections) as cluster:
        client = Client(cluster, key)
        desk.run("adapters", "import", "acme/bot", adapters["a0"])
        desk.run("adapters", "import", "acme/bot", adapters["a1"], "--tag", "live")
        desk.run("adapters", "import", "acme/bot", adapters["mixed"])
        desk.run("adapters", "import", "acme/other", adapters["reft"], "--tag", "canary")
        desk.run(*(str(backup) if word.startswith("/") else word for word in first))
        answers = {each: client.answer(each) for each in REFERENCES}
        assert len({text for _, text in answers.values()}) == len(REFERENCES)  # each adapter shows
        usage = client.usage_of(len(REFERENCES))
        load = Load(desk, Client(cluster, other), [adapters["a2"], adapters["a3"]])
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(load.run)
            try:
                wait_until(lambda: running.done() or load.num_rounds > 0)
                done = desk.run(*(str(backup) if word.startswith("/") else word for word in second))
                before = load.num_rounds
                wait_until(lambda: running.done() or load.num_rounds > before)
            finally:
                load.stop()
            running.result()
    assert (done["num_revisions"], done["lacking"]) == (done["num_copied"] + 4, [])  # the first backup had four
    sha256 = stored_digests(tmp_path, answers)

    shutil.rmtree(tmp_path / ".prelude")
    restored = desk.run(*(str(backup) if word.startswith("/") else word for word in restoring))
    assert (restored["catalog"], restored["num_copied"]) == (done["catalog"], done["num_revisions"])
    assert restored["num_unsigned"] == done["num_revisions"]  # the keys were lost with the rest
    assert desk.run(*signing)["num_signed"] == done["num_revisions"]
    assert desk.run(*checking)["is_sound"]
    assert stored_digests(tmp_path, answers) == sha256
    with running_cluster(tmp_path, model_dir, {}, **sections) as cluster:
        client = Client(cluster, key)
        mine = {row["key"] for row in usage}
        assert [row for row in client.usage() if row["key"] in mine] == usage
        assert {each: client.answer(each) for each in REFERENCES} == answers
        refused = httpx.post(
            f"{cluster.url}/v1/completions", json=BODY, headers={"authorization": f"Bearer {lost}"}, timeout=60
        )
        assert refused.status_code == 401


def stored_digests(folder: Path, answers: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Of the packed adapters, by revision."""
    store = open_store(f"file://{folder}/.prelude/store")
    return {revision: store.verify(revision).content_sha256 for revision, _ in answers.values()}
