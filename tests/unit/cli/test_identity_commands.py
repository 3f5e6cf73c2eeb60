"""`prelude keys | grants | tenants | audit` on a catalog, a store and an agent: effects, output, exit statuses."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.adapters.random_adapters import write_random_lora
from support.adapters.tiny_model import write_model_config
from support.clusters.served_agent import served
from support.commands import Prelude

from adapters.model.base_model import BaseModel
from cli.main import main
from cluster.config.load import load_cluster_config
from cluster.control import control_pb2 as pb
from cluster.control import worker_state
from cluster.control.control_pb2_grpc import WorkerControlServicer
from cluster.control.worker_state import WorkerStateHub
from cluster.open_library import open_library


class Agent(WorkerControlServicer):
    """Has revisions in memory, on disk and pinned. One in use is refused once."""

    def __init__(self) -> None:
        self.resident: set[str] = set()
        self.on_disk: set[str] = set()
        self.memory_only: set[str] = set()
        self.pins: set[str] = set()
        self.busy: set[str] = set()  # the first eviction is refused
        self.in_use: set[str] = set()  # every eviction is refused

    async def WatchState(self, request, context) -> Any:
        hub = WorkerStateHub()
        hub.resident, hub.on_disk, hub.in_memory_only = self.resident, self.on_disk, self.memory_only
        async for state in hub.watch(request.heartbeat_s):
            yield state

    async def PinAdapter(self, request, context) -> pb.PinAdapterResponse:
        assert not request.pinned
        self.pins.discard(request.revision_id)
        return pb.PinAdapterResponse()

    async def EvictAdapter(self, request, context) -> pb.EvictAdapterResponse:
        revision_id = request.revision_id
        if revision_id in self.in_use | self.busy | self.pins:
            self.busy.discard(revision_id)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is in use")
        assert request.from_disk
        for place in (self.resident, self.on_disk, self.memory_only):
            place.discard(revision_id)
        return pb.EvictAdapterResponse(evicted=True)


@pytest.fixture
def agent() -> Iterator[tuple[Agent, int]]:
    running = Agent()
    with served(running) as port:
        yield running, port


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: tuple[Agent, int]) -> Path:
    write_model_config(tmp_path)
    config = f"model: {{path: ., name: demo}}\nworkers:\n  u: {{role: unified, control_port: {agent[1]}}}\n"
    (tmp_path / "cluster.yaml").write_text(config)
    for seed in (1, 2, 3):
        write_random_lora(tmp_path / f"lora-{seed}", BaseModel.read(tmp_path), seed, rank=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def audit(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main(["audit", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_keys(prelude: Prelude, capsys: pytest.CaptureFixture[str]):
    made = prelude.json("keys", "create", "ci", "--tenant", "acme", "--scopes", "infer,adapters:read")
    assert (made["scopes"], made["expires_at"]) == (["adapters:read", "infer"], None)
    assert made["key"].startswith(f"prelude_{made['id']}_")
    (listed,) = prelude.json("keys", "list", "--tenant", "acme")
    assert listed == {name: value for name, value in made.items() if name != "key"}
    assert prelude.json("keys", "revoke", made["id"])["revoked_at"]
    assert prelude("keys", "revoke", made["id"])[0] == 1
    assert prelude.json("keys", "revoke", "nosuchkey", status=1)["error"]["code"] == "access_not_found"
    for wrong in (
        ("--tenant", "a/b"),
        ("--tenant", "acme", "--scopes", "everything"),
        ("--tenant", "acme", "--expires", "0s"),
    ):
        assert prelude("keys", "create", "ci", *wrong)[0] == 2, wrong
    refused = prelude.json("keys", "create", "ci", "--tenant", "a/b", status=2)["error"]
    assert refused["code"] == "invalid_adapter_reference"
    events = audit(capsys)
    assert [(each["action"], each["new"], each["outcome"]) for each in events[:4]] == [
        ("key.create", made["id"], "done"),
        ("key.revoke", None, "done"),
        ("key.revoke", None, "catalog_conflict"),
        ("key.revoke", None, "access_not_found"),
    ]
    assert made["key"] not in str(events)
    assert all(each["who"].endswith("(command line)") for each in events)


def test_grants_and_prefixes(prelude: Prelude):
    prelude("adapters", "import", "acme/legal", "lora-1")
    grant = {"owner": "acme", "adapter": "acme/legal", "grantee": "beta", "permission": "infer"}
    assert prelude.json("grants", "add", "acme/legal", "--to", "beta") == grant
    prelude("grants", "add", "acme", "--to", "beta", "--permission", "read")
    assert [each["adapter"] for each in prelude.json("grants", "list", "--tenant", "beta")] == [None, "acme/legal"]
    assert prelude("grants", "remove", "acme/legal", "--to", "beta")[0] == 0
    assert prelude("grants", "remove", "acme/legal", "--to", "beta")[0] == 1
    assert prelude("grants", "add", "acme/typo", "--to", "beta")[0] == 1
    assert prelude.json("adapters", "prefixes", "acme/legal", "--shared")["prefixes"] == "shared"


def test_a_tenant_is_deleted_and_that_is_shown(
    prelude: Prelude, agent: tuple[Agent, int], folder: Path, capsys: pytest.CaptureFixture[str]
):
    worker, _ = agent
    own = prelude.json("adapters", "import", "acme/legal", "lora-1")["revision"]
    common = prelude.json("adapters", "import", "acme/tax", "lora-2")["revision"]
    prelude("adapters", "import", "beta/tax", "lora-2")
    deleted = prelude.json("adapters", "import", "acme/old", "lora-3")["revision"]
    prelude("adapters", "delete", "acme/old")
    prelude("keys", "create", "ci", "--tenant", "acme")
    prelude("grants", "add", "acme/legal", "--to", "beta")
    prelude("grants", "add", "beta/tax", "--to", "acme")
    worker.resident, worker.on_disk = {own, common, deleted}, {own, common}
    worker.pins = {own, common}
    worker.busy = {deleted}
    found = {each["name"]: each for each in prelude.json("tenants", "list")}
    assert {name: found["acme"][name] for name in ("adapters", "keys", "grants")} == {
        "adapters": 3, "keys": 1, "grants": 2
    }  # fmt: skip

    assert prelude("tenants", "delete", "acme")[0] == 2  # without --yes
    result = prelude.json("tenants", "delete", "acme", "--yes")
    assert result["nothing_left"], result
    assert result["removed"] == {"adapters": 3, "alias_moves": 3, "keys": 1, "grants": 2, "revisions": 2}
    assert result["left"]["catalog"].keys() >= {"tenants", "adapters", "alias_moves", "api_keys", "grants", "changes"}
    assert set(result["left"]["catalog"].values()) == {0}
    assert (result["left"]["store"], result["left"]["workers"]) == ([], {"u": []})
    assert re.fullmatch(r"acme#\d+", first := result["next_cache_namespace"])
    assert worker.resident == worker.on_disk == {common}  # beta has it, too
    assert worker.pins == {common}  # which others have, too
    library = open_library(load_cluster_config(folder / "cluster.yaml"))
    assert [library.store.exists(each) for each in (own, common, deleted)] == [False, True, False]
    assert library.catalog.resolve("beta/tax").revision_id == common
    library.catalog.close()
    assert [each["name"] for each in prelude.json("tenants", "list")] == ["beta"]
    assert prelude.json("tenants", "delete", "acne", "--yes", status=1)["error"]["code"] == "access_not_found"
    assert [each["outcome"] for each in audit(capsys) if each["action"] == "tenant.delete"] == [
        "done",
        "access_not_found",
    ]
    assert prelude.json("adapters", "import", "acme/legal", "lora-1")["number"] == 1  # a new tenant of the old name
    assert prelude.json("tenants", "delete", "acme", "--yes")["next_cache_namespace"] not in ("acme", first)


def test_a_tenant_that_only_tokens_name_is_deleted(prelude: Prelude, folder: Path):
    """The catalog does not know it, but prefix caches do."""
    assert (
        prelude.json("tenants", "delete", "acme", "--yes", "--without-workers", status=1)["error"]["code"]
        == "access_not_found"
    )
    with (folder / "cluster.yaml").open("a") as file:
        file.write("router: {auth: {oidc: [{issuer: 'https://login.example.com', audience: prelude}]}}\n")
    found = [prelude.json("tenants", "delete", "acme", "--yes", "--without-workers") for _ in range(2)]
    assert len({"acme", *(result["next_cache_namespace"] for result in found)}) == 3
    assert prelude("tenants", "delete", "no/name", "--yes", "--without-workers")[0] != 0


def test_what_is_left_is_a_failure_and_the_next_run_finishes(prelude: Prelude, agent: tuple[Agent, int], folder: Path):
    worker, _ = agent
    own = prelude.json("adapters", "import", "acme/legal", "lora-1")["revision"]
    other = prelude.json("adapters", "import", "beta/legal", "lora-2")["revision"]
    pushed = "sha256:" + "0" * 64  # by a router, which has not committed it yet
    worker.resident, worker.in_use, worker.memory_only = {own, other}, {own}, {pushed}
    delete = ("tenants", "delete", "acme", "--yes", "--wait", "0.01", "--json")
    result = json.loads(prelude.refuses(*delete, says="run the command again"))
    assert (result["nothing_left"], result["left"]["workers"]) == (False, {"u": [own]})
    result = prelude.json(*delete, status=1)
    assert result["left"]["workers"] == {"u": [own]}
    begun = result["next_cache_namespace"]  # by the first run
    worker.in_use = set()
    result = prelude.json("tenants", "delete", "acme", "--yes")
    assert (result["nothing_left"], result["next_cache_namespace"]) == (True, begun), result
    assert (worker.resident, worker.memory_only) == ({other}, {pushed})


def test_all_of_a_long_snapshot_is_read(prelude: Prelude, agent: tuple[Agent, int], monkeypatch: pytest.MonkeyPatch):
    worker, _ = agent
    own = prelude.json("adapters", "import", "acme/legal", "lora-1")["revision"]
    monkeypatch.setattr(worker_state, "_MAX_IDS", 2)
    worker.resident = worker.on_disk = {f"sha256:{number:064x}" for number in range(3)} | {own}
    worker.in_use = {own}
    result = prelude.json("tenants", "delete", "acme", "--yes", "--wait", "0.01", status=1)
    assert result["left"]["workers"] == {"u": [own]}


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
def test_a_wait_that_is_no_time_is_refused(prelude: Prelude, seconds: str):
    said = f"--wait: '{seconds}' is no number from 0 on"
    prelude.refuses("tenants", "delete", "acme", "--yes", f"--wait={seconds}", says=said, status=2)


def test_a_tenant_of_the_configuration_stays(prelude: Prelude, folder: Path):
    with (folder / "cluster.yaml").open("a") as file:
        file.write("adapters: {acme/legal: {path: lora-1}}\n")
    result = prelude.json("tenants", "delete", "acme", "--yes", status=2)
    assert "imported again" in result["error"]["message"]


@pytest.mark.slow
def test_workers_that_cannot_be_asked_are_no_proof(prelude: Prelude, agent: tuple[Agent, int], folder: Path):
    prelude("adapters", "import", "acme/legal", "lora-1")
    text = (folder / "cluster.yaml").read_text()
    (folder / "cluster.yaml").write_text(text.replace(str(agent[1]), "9"))  # nobody listens there
    result = prelude.json("tenants", "delete", "acme", "--yes", status=1)
    assert not result["nothing_left"]
    assert result["left"]["workers"]["u"].startswith("not known")
    (folder / "cluster.yaml").write_text(text)
    assert prelude.json("tenants", "delete", "acme", "--yes")["left"]["workers"] == {"u": []}
    (folder / "cluster.yaml").write_text(text.replace(str(agent[1]), "0"))
    prelude("adapters", "import", "beta/legal", "lora-1")
    assert prelude("tenants", "delete", "beta", "--yes")[0] == 2
    assert prelude.json("tenants", "delete", "beta", "--yes", "--without-workers")["nothing_left"]
