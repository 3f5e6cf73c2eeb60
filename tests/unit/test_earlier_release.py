"""Release 0.1.0 beside this one, as during an upgrade: its catalog, its router and its workers' control service.

Its own code runs in processes of its own, from the repository's history. Engines are stand-ins: the SGLang that it pins
is not installed, nor is Alembic, in whose place its tables are made by its own metadata.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from support.adapters.catalog_databases import CatalogDatabase, add
from support.adapters.stored_objects import revision
from support.router_stand_ins.adapters import REVISION_ID

from adapters.catalog.api_keys import digest_of
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.usage import Counts, Subject

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
RELEASE = "ce1df67af4e8a153db9af8a238d484ab3a09b307"
MAKES_TABLES = """
from sqlalchemy import insert, inspect, text
from adapters.catalog.sql.tables import change_counter, metadata
def migrate(connection):
    if not inspect(connection).has_table("alembic_version"):
        metadata.create_all(connection)
        connection.execute(insert(change_counter), {"id": 1, "last": 0})
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('0007')"))
"""
CATALOG = """
import json, sys
from support.adapters.catalog_databases import add
from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Scope
catalog, key = SqlCatalog.open(sys.argv[1]), ""
if sys.argv[2] == "fill":
    add(catalog, "bot", 1), add(catalog, "bot", 2), add(catalog, "gone", 3)
    catalog.set_alias("default", "bot", "live", 1)
    catalog.delete("default", "gone")
    key = catalog.keys.create("acme", "app", {Scope.INFER}, expires_at=None, by="test")[1]
found = {each: catalog.resolve(each).revision_id for each in ("bot", "bot@live", "bot@r1")}
print(json.dumps({"key": key, "found": found, "keys": len(catalog.keys.list()), "next": add(catalog, "bot", 4).number}))
"""
WORKERS = """
import asyncio, json, sys
from support.router_stand_ins.worker import WorkerStandIn
async def main():
    prefill, decode = WorkerStandIn("p0", "prefill"), WorkerStandIn("d0", "decode")
    for each in (prefill, decode):
        await each.start()
    prefill.state.warm_pairs.add(decode_name="d0", decode_incarnation=decode.state.incarnation)
    print(json.dumps({each.name: each.address for each in (prefill, decode)}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    paths = [[json.loads(body).get("lora_path") for body in each.engine.bodies] for each in (prefill, decode)]
    print(json.dumps({"ensured": prefill.ensured, "lora_paths": paths}), flush=True)
    for each in (prefill, decode):
        await each.stop()
asyncio.run(main())
"""
ROUTER = """
import asyncio, json, sys
from support.router_stand_ins import cluster as module
class Elsewhere(module.WorkerStandIn):
    async def start(self):
        self.address = json.loads(sys.argv[1])[self.name]
    async def stop(self):
        pass
module.WorkerStandIn = Elsewhere
async def main():
    async with module.running_cluster() as cluster:
        for fields in json.loads(sys.argv[2]):
            body = {"model": "base", "prompt": "Hi", **fields}
            async with cluster.http.post(f"{cluster.url}/v1/completions", json=body) as answer:
                status, headers, text = answer.status, answer.headers, await answer.text()
                print(json.dumps([status, headers.get("x-prelude-revision"), text]), flush=True)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of 0.1.0, which can be imported."""
    packed = subprocess.run(["git", "archive", RELEASE], cwd=ROOT, capture_output=True)
    if packed.returncode:
        warnings.warn("nothing is shown about upgrades from 0.1.0", stacklevel=1)
        pytest.skip(f"the history lacks {RELEASE[:8]}, as in a shallow clone: git fetch --unshallow")
    folder = tmp_path_factory.mktemp("release")
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    (folder / "adapters/catalog/sql/migrations/schema.py").write_text(MAKES_TABLES)
    (folder / "prelude-0.1.0.dist-info").mkdir()
    (folder / "prelude-0.1.0.dist-info" / "METADATA").write_text("Name: prelude\nVersion: 0.1.0\n")
    return folder


@contextmanager
def running(tree: Path, code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Code that imports from a tree. It is ended with the block."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'tests'}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code, *words], cwd=tree, env=environment, text=True, **pipes)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def printed(tree: Path, code: str, *words: str) -> list[list | dict]:
    with running(tree, code, *words) as process:
        return [json.loads(line) for line in process.communicate(timeout=200)[0].splitlines()]


def test_its_catalog_goes_on_here_and_there(release: Path, database: CatalogDatabase) -> None:
    """Here, tokens are counted in a table more; it reads and writes what is left of the others."""
    (filled,) = printed(release, CATALOG, database.url, "fill")
    with closing(SqlCatalog.open(database.url)) as catalog:
        assert {each: catalog.resolve(each).revision_id for each in filled["found"]} == {
            **filled["found"], "bot": revision(4)
        }  # fmt: skip
        assert [each.digest for each in catalog.keys.list()] == [digest_of(filled["key"])]
        catalog.restore("default", "gone")
        catalog.set_alias("default", "bot", "live", add(catalog, "bot", 5).number)
        catalog.usage.put([(Subject(495_000, "acme", "", "", "", "base"), Counts(1, 0, 7, 0, 3, "r1"))])
        (again,) = printed(release, CATALOG, database.url, "read")
        expected = {"bot": revision(5), "bot@live": revision(5), "bot@r1": revision(1)}
        assert again == {"key": "", "found": expected, "keys": 1, "next": 3}  # it had 4 already
        assert catalog.resolve("gone").revision_id == revision(3)


@pytest.mark.parametrize("is_its_router", [True, False], ids=["its router", "its workers"])
def test_requests_pass_between_the_releases(release: Path, is_its_router: bool) -> None:
    routers, workers = (release, ROOT) if is_its_router else (ROOT, release)
    asked = [{"adapter": "a0"}, {"adapter": "a0", "stream": True}, {}, {"max_tokens": 0}, {"adapter": "nobody"}]
    with running(workers, WORKERS) as process:
        assert process.stdout
        answers = printed(routers, ROUTER, process.stdout.readline(), json.dumps(asked))
        (seen,) = map(json.loads, process.communicate(timeout=120)[0].splitlines())
    assert [(status, revision_id) for status, revision_id, _ in answers] == [
        (200, REVISION_ID), (200, REVISION_ID), (200, None), (200, None), (404, None)
    ]  # fmt: skip
    assert all(text in answers[0][2] for text in ("Hello wide world", '"prompt_tokens":7'))
    assert "data: [DONE]" in answers[1][2]
    assert seen == {"ensured": [REVISION_ID] * 2, "lora_paths": [[REVISION_ID] * 2 + [None] * 2, [None] * 3]}
