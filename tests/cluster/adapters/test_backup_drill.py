"""The commands of docs/adapters.md, "Backups", on a real worker: back up under load, lose everything, restore, serve.

A cluster of its own.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.waiting import wait_until

from adapters.catalog.api_keys import key_id_of
from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Scope
from adapters.store import open_store

ROOT = Path(__file__).parents[3]
WITHIN_S = 300.0  # beside ten busy processes a command takes twenty
REFERENCES = ("bot", "bot@live", "bot@r1", "other@canary")
BODY = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


def commands_of_page() -> list[list[str]]:
    """The words after `prelude` of each command of the section."""
    section = (ROOT / "docs" / "adapters.md").read_text().split("## Backups\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return [line.partition("#")[0].split()[1:] for line in block.splitlines() if line.startswith("prelude ")]


def run(folder: Path, *words: object) -> Any:
    """What `prelude …` prints as JSON; it has to succeed. The page's /mnt is in the folder."""
    given = [str(word).replace("/mnt/", f"{folder}/") for word in words]
    command = [sys.executable, "-m", "cli.main", *given, "--config", folder / "cluster.yaml", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def asked(cluster: RunningCluster, key: str, adapter: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{cluster.url}/v1/completions", json={**BODY, "adapter": adapter}, headers=headers, timeout=120)


def answers(cluster: RunningCluster, key: str) -> dict[str, tuple[str, str]]:
    """Revision and text by reference."""
    found = {each: asked(cluster, key, f"acme/{each}") for each in REFERENCES}
    return {each: (it.headers["x-prelude-revision"], it.json()["choices"][0]["text"]) for each, it in found.items()}


def usage(cluster: RunningCluster, key: str, num_requests: int) -> list[dict[str, Any]]:
    """The key's rows, once so many requests have been written."""
    parameters, headers = {"group_by": "hour,key,adapter,revision"}, {"authorization": f"Bearer {key}"}

    def rows() -> list[dict[str, Any]]:
        answer = httpx.get(f"{cluster.url}/v1/usage", params=parameters, headers=headers, timeout=60)
        return [row for row in answer.json().get("data", []) if row["key"] == key_id_of(key)]

    wait_until(lambda: sum(row["requests"] for row in rows()) >= num_requests, WITHIN_S)
    return rows()


def digests(folder: Path, found: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Of the packed adapters, by revision."""
    store = open_store(f"file://{folder}/.prelude/store")
    return {revision: store.verify(revision).content_sha256 for revision, _ in found.values()}


def test_the_drill(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    first, second, restoring, signing, checking = commands_of_page()
    (tmp_path / ".prelude").mkdir()
    catalog = SqlCatalog.open(f"sqlite:///{tmp_path}/.prelude/catalog.db")
    scopes = {Scope.INFER, Scope.ADAPTERS_READ}
    made = [catalog.keys.create("acme", each, scopes, expires_at=None, by="test") for each in ("app", "load", "lost")]
    catalog.keys.revoke(made[2][0].key_id)
    catalog.close()
    app, loading, lost = (key for _, key in made)
    enough, rounds = threading.Event(), []

    def load(cluster: RunningCluster) -> None:
        """Import, move an alias, ask, delete, restore; what fails ends it."""
        while not enough.is_set():
            name = f"acme/busy{len(rounds) % 2}"
            run(tmp_path, "adapters", "import", name, adapters[("a2", "a3")[len(rounds) % 2]], "--tag", "at")
            assert asked(cluster, loading, name).status_code == 200
            run(tmp_path, "adapters", "delete", name)
            run(tmp_path, "adapters", "restore", name)
            rounds.append(name)

    sections: dict[str, Any] = {"router": {"port": 0, "auth": {}}, "workers": {"unified-0": {"role": "unified"}}}
    with running_cluster(tmp_path, model_dir, {}, **sections) as cluster, ThreadPoolExecutor(1) as pool:
        for name, directory, *tag in (("bot", "a0"), ("bot", "a1", "--tag", "live"), ("bot", "mixed")):
            run(tmp_path, "adapters", "import", f"acme/{name}", adapters[directory], *tag)
        run(tmp_path, "adapters", "import", "acme/other", adapters["reft"], "--tag", "canary")
        run(tmp_path, *first)
        wait_until(lambda: asked(cluster, app, "acme/bot").status_code == 200, WITHIN_S)
        served = answers(cluster, app)
        used = usage(cluster, app, 1 + len(REFERENCES))
        running = pool.submit(load, cluster)
        try:
            wait_until(lambda: running.done() or rounds, WITHIN_S)
            done, num_rounds = run(tmp_path, *second), len(rounds)
            wait_until(lambda: running.done() or len(rounds) > num_rounds, WITHIN_S)
        finally:
            enough.set()
        running.result()
    assert len({text for _, text in served.values()}) == len(REFERENCES)  # each adapter shows
    assert done["num_revisions"] == done["num_copied"] + 4  # the first backup had four
    stored = digests(tmp_path, served)

    shutil.rmtree(tmp_path / ".prelude")  # with the signing keys
    restored = run(tmp_path, *restoring)
    assert restored == {**done, "num_copied": done["num_revisions"], "num_unsigned": done["num_revisions"]}
    assert run(tmp_path, *signing)["num_signed"] == done["num_revisions"]
    assert run(tmp_path, *checking)["is_sound"]
    assert digests(tmp_path, served) == stored
    with running_cluster(tmp_path, model_dir, {}, **sections) as cluster:
        assert usage(cluster, app, 1 + len(REFERENCES)) == used
        assert asked(cluster, lost, "acme/bot").status_code == 401
        assert answers(cluster, app) == served
