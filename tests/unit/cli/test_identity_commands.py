"""`prelude keys | grants | tenants | audit` on a catalog, a store and an agent: effects, output, exit statuses."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.adapters.random_adapters import write_random_lora
from support.clusters.served_agent import served
from support.commands import SMALL_LLAMA, run_command

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
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    config = f"model: {{path: ., name: demo}}\nworkers:\n  u: {{role: unified, control_port: {agent[1]}}}\n"
    (tmp_path / "cluster.yaml").write_text(config)
    for seed in (1, 2, 3):
        write_random_lora(tmp_path / f"lora-{seed}", BaseModel.read(tmp_path), seed, rank=2)
    monkeypatch.chdir(tmp_path)
    return tmp_path


Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def prelude(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json; returns its exit status, its parsed output and what it wrote to stderr."""

    def run(*arguments: str) -> tuple[int, Any, str]:
        status, out, errors = run_command(capsys, *arguments, "--json")
        return status, json.loads(out) if out.strip() else None, errors

    return run


def audit(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main(["audit", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_keys(prelude: Run, capsys: pytest.CaptureFixture[str]):
    status, made, _ = prelude("keys", "create", "ci", "--tenant", "acme", "--scopes", "infer,adapters:read")
    assert (status, made["scopes"], made["expires_at"]) == (0, ["adapters:read", "infer"], None)
    assert made["key"].startswith(f"prelude_{made['id']}_")
    _, (listed,), _ = prelude("keys", "list", "--tenant", "acme")
    assert listed == {name: value for name, value in made.items() if name != "key"}
    assert prelude("keys", "revoke", made["id"])[1]["revoked_at"]
    assert prelude("keys", "revoke", made["id"])[0] == 1
    assert prelude("keys", "revoke", "nosuchkey")[1]["error"]["code"] == "access_not_found"
    for wrong in (
        ("--tenant", "a/b"),
        ("--tenant", "acme", "--scopes", "everything"),
        ("--tenant", "acme", "--expires", "0s"),
    ):
        assert prelude("keys", "create", "ci", *wrong)[0] == 2, wrong
    assert prelude("keys", "create", "ci", "--tenant", "a/b")[1]["error"]["code"] == "invalid_adapter_reference"
    events = audit(capsys)
    assert [(each["action"], each["new"], each["outcome"]) for each in events[:4]] == [
        ("key.create", made["id"], "done"),
        ("key.revoke", None, "done"),
        ("key.revoke", None, "catalog_conflict"),
        ("key.revoke", None, "access_not_found"),
    ]
    assert made["key"] not in str(events)
    assert all(each["who"].endswith("(command line)") for each in events)


def test_grants_and_prefixes(prelude: Run):
    prelude("adapters", "import", "acme/legal", "lora-1")
    status, grant, _ = prelude("grants", "add", "acme/legal", "--to", "beta")
    assert (status, grant) == (0, {"owner": "acme", "adapter": "acme/legal", "grantee": "beta", "permission": "infer"})
    prelude("grants", "add", "acme", "--to", "beta", "--permission", "read")
    assert [each["adapter"] for each in prelude("grants", "list", "--tenant", "beta")[1]] == [None, "acme/legal"]
    assert prelude("grants", "remove", "acme/legal", "--to", "beta")[0] == 0
    assert prelude("grants", "remove", "acme/legal", "--to", "beta")[0] == 1
    assert prelude("grants", "add", "acme/typo", "--to", "beta")[0] == 1
    assert prelude("adapters", "prefixes", "acme/legal", "--shared")[1]["prefixes"] == "shared"


def test_a_tenant_is_deleted_and_that_is_shown(
    prelude: Run, agent: tuple[Agent, int], folder: Path, capsys: pytest.CaptureFixture[str]
):
    worker, _ = agent
    own = prelude("adapters", "import", "acme/legal", "lora-1")[1]["revision"]
    common = prelude("adapters", "import", "acme/tax", "lora-2")[1]["revision"]
    prelude("adapters", "import", "beta/tax", "lora-2")
    deleted = prelude("adapters", "import", "acme/old", "lora-3")[1]["revision"]
    prelude("adapters", "delete", "acme/old")
    prelude("keys", "create", "ci", "--tenant", "acme")
    prelude("grants", "add", "acme/legal", "--to", "beta")
    prelude("grants", "add", "beta/tax", "--to", "acme")
    worker.resident, worker.on_disk = {own, common, deleted}, {own, common}
    worker.pins = {own, common}
    worker.busy = {deleted}
    found = {each["name"]: each for each in prelude("tenants", "list")[1]}
    assert {name: found["acme"][name] for name in ("adapters", "keys", "grants")} == {
        "adapters": 3, "keys": 1, "grants": 2
    }  # fmt: skip

    assert prelude("tenants", "delete", "acme")[0] == 2  # without --yes
    status, result, _ = prelude("tenants", "delete", "acme", "--yes")
    assert (status, result["nothing_left"]) == (0, True), result
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
    assert [each["name"] for each in prelude("tenants", "list")[1]] == ["beta"]
    assert prelude("tenants", "delete", "acne", "--yes")[1]["error"]["code"] == "access_not_found"
    assert [each["outcome"] for each in audit(capsys) if each["action"] == "tenant.delete"] == [
        "done",
        "access_not_found",
    ]
    assert prelude("adapters", "import", "acme/legal", "lora-1")[1]["number"] == 1  # a new tenant of the old name
    assert prelude("tenants", "delete", "acme", "--yes")[1]["next_cache_namespace"] not in ("acme", first)


def test_a_tenant_that_only_tokens_name_is_deleted(prelude: Run, folder: Path):
    """The catalog does not know it, but prefix caches do."""
    assert prelude("tenants", "delete", "acme", "--yes", "--without-workers")[1]["error"]["code"] == "access_not_found"
    with (folder / "cluster.yaml").open("a") as file:
        file.write("router: {auth: {oidc: [{issuer: 'https://login.example.com', audience: prelude}]}}\n")
    found = [prelude("tenants", "delete", "acme", "--yes", "--without-workers") for _ in range(2)]
    assert [status for status, _, _ in found] == [0, 0]
    assert len({"acme", *(result["next_cache_namespace"] for _, result, _ in found)}) == 3
    assert prelude("tenants", "delete", "no/name", "--yes", "--without-workers")[0] != 0


def test_what_is_left_is_a_failure_and_the_next_run_finishes(prelude: Run, agent: tuple[Agent, int], folder: Path):
    worker, _ = agent
    own = prelude("adapters", "import", "acme/legal", "lora-1")[1]["revision"]
    other = prelude("adapters", "import", "beta/legal", "lora-2")[1]["revision"]
    pushed = "sha256:" + "0" * 64  # by a router, which has not committed it yet
    worker.resident, worker.in_use, worker.memory_only = {own, other}, {own}, {pushed}
    status, result, error = prelude("tenants", "delete", "acme", "--yes", "--wait", "0.01")
    assert (status, result["nothing_left"], result["left"]["workers"]) == (1, False, {"u": [own]})
    assert "run the command again" in error
    status, result, error = prelude("tenants", "delete", "acme", "--yes", "--wait", "0.01")
    assert (status, result["left"]["workers"]) == (1, {"u": [own]})
    begun = result["next_cache_namespace"]  # by the first run
    worker.in_use = set()
    status, result, _ = prelude("tenants", "delete", "acme", "--yes")
    assert (status, result["nothing_left"], result["next_cache_namespace"]) == (0, True, begun), result
    assert (worker.resident, worker.memory_only) == ({other}, {pushed})


def test_all_of_a_long_snapshot_is_read(prelude: Run, agent: tuple[Agent, int], monkeypatch: pytest.MonkeyPatch):
    worker, _ = agent
    own = prelude("adapters", "import", "acme/legal", "lora-1")[1]["revision"]
    monkeypatch.setattr(worker_state, "_MAX_IDS", 2)
    worker.resident = worker.on_disk = {f"sha256:{number:064x}" for number in range(3)} | {own}
    worker.in_use = {own}
    status, result, _ = prelude("tenants", "delete", "acme", "--yes", "--wait", "0.01")
    assert (status, result["left"]["workers"]) == (1, {"u": [own]})


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
def test_a_wait_that_is_no_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["tenants", "delete", "acme", "--yes", f"--wait={seconds}"])
    assert ended.value.code == 2
    assert f"--wait: '{seconds}' is no number from 0 on" in capsys.readouterr().err


def test_a_tenant_of_the_configuration_stays(prelude: Run, folder: Path):
    with (folder / "cluster.yaml").open("a") as file:
        file.write("adapters: {acme/legal: {path: lora-1}}\n")
    status, result, _ = prelude("tenants", "delete", "acme", "--yes")
    assert status == 2
    assert "imported again" in result["error"]["message"]


@pytest.mark.slow
def test_workers_that_cannot_be_asked_are_no_proof(prelude: Run, agent: tuple[Agent, int], folder: Path):
    prelude("adapters", "import", "acme/legal", "lora-1")
    text = (folder / "cluster.yaml").read_text()
    (folder / "cluster.yaml").write_text(text.replace(str(agent[1]), "9"))  # nobody listens there
    status, result, _ = prelude("tenants", "delete", "acme", "--yes")
    assert (status, result["nothing_left"]) == (1, False)
    assert result["left"]["workers"]["u"].startswith("not known")
    (folder / "cluster.yaml").write_text(text)
    assert prelude("tenants", "delete", "acme", "--yes")[1]["left"]["workers"] == {"u": []}
    (folder / "cluster.yaml").write_text(text.replace(str(agent[1]), "0"))
    prelude("adapters", "import", "beta/legal", "lora-1")
    assert prelude("tenants", "delete", "beta", "--yes")[0] == 2
    assert prelude("tenants", "delete", "beta", "--yes", "--without-workers")[1]["nothing_left"]
