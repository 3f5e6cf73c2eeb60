"""Adapters that come and go, on a pair with slots for 8, host memory for 16, and the catalog in PostgreSQL.

Hundreds of requests over dozens of adapters while adapters are deleted, restored and pushed, and clients leave. Every
answer is held against the reference for the revision that its header names. Afterwards nothing is left of any adapter.

Then revisions are pushed into the worker's memory only: answers are theirs, no disk has them, they outlive an engine
that is stopped, and end with the worker. Pushes to several workers are in tests/unit/router.

A cluster of its own.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.adapters.catalog_databases import PostgresDatabase, postgres_server
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.clusters.pushed_versions import BACK_WITHIN_S, HOLDER, MIN_ANSWERS, NAME, PROMPT, Pushed
from support.clusters.pushed_versions import NEW_TOKENS as VERSION_TOKENS
from support.clusters.running_cluster import RunningCluster, is_ready, running_cluster
from support.engines.parity import completion_body
from support.engines.reference_answers import run_reference
from support.waiting import wait_until

from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.packed import write_packed
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from prefill_worker.residency.tiers.host_memory import room_bytes

NUM_ADAPTERS, NUM_PUSHES, NUM_REQUESTS = 48, 12, 240
SLOTS, IN_HOST_MEMORY, AT_ONCE = 8, 16, 16
NEW_TOKENS = 8
OUT_WITHIN_S = 30.0  # of a stop: 10 to 12 s on a machine that is not overloaded
RESTARTED_WITHIN_S = 60.0


@dataclass
class Fleet:
    """The cluster, what each revision answers, and what happened to whom when."""

    cluster: RunningCluster
    directories: dict[str, list[Path]]  # by adapter; all but the first are to be pushed
    prompts: dict[str, tuple[int, ...]]
    revisions: dict[Path, str]
    expected: dict[tuple[str, str], list[int]]  # (adapter, revision) -> tokens
    deleted: set[str] = field(default_factory=set)  # surely, between two answers
    may_be_deleted: set[str] = field(default_factory=set)  # from before its deletion is asked for till it is restored
    deletions: Counter[str] = field(default_factory=Counter)
    latest: dict[str, int] = field(default_factory=dict)  # of an adapter's directories, as its last push answered
    seen: Counter[str] = field(default_factory=Counter)


def write_adapter(folder: Path, base: BaseModel, seed: int) -> Path:
    """LoRA and ReFT of several ranks and places."""
    if seed % 4 == 3:
        return write_random_reft(folder, base, seed, rank=1 + seed % 4, layers=(seed % 2, 2))
    modules = (("q_proj", "v_proj"), ("o_proj", "down_proj"), ("k_proj", "up_proj", "gate_proj"))[seed % 3]
    return write_random_lora(folder, base, seed, modules=modules, rank=(4, 8)[seed % 2])


@pytest.fixture(scope="module")
def many(tmp_path_factory, model_dir: Path) -> dict[str, list[Path]]:
    """By adapter, its versions. All but the first are to be pushed."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("many")
    directories: dict[str, list[Path]] = {}
    for number in range(NUM_ADAPTERS + NUM_PUSHES):
        name = f"adapter-{number % NUM_ADAPTERS}"
        directories.setdefault(name, []).append(write_adapter(root / str(number), base, 1000 + number))
    return directories


@pytest.fixture(scope="module")
def versions(tmp_path_factory, model_dir: Path) -> list[Path]:
    """Of one more adapter. The first one is stored, the others are pushed."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("versions")
    loras = [write_random_lora(root / f"v{seed}", base, 50 + seed, rank=8) for seed in range(3)]
    return [*loras, write_random_reft(root / "v3", base, 53, rank=4)]


@pytest.fixture(scope="module")
def managed(tmp_path_factory, model_dir: Path, many: dict[str, list[Path]], versions: list[Path]):
    """A pair with little room for adapters."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("managed")
    largest = 0  # bytes of one of the many in host memory, of the first twelve: the others are of the same shapes
    for number, path in enumerate(paths[0] for paths in list(many.values())[:12]):
        packed = tmp_path_factory.mktemp("packed") / str(number)
        write_packed(read_adapter(path, base, Limits()), base, "float32", packed)
        largest = max(largest, room_bytes(packed.stat().st_size))
    with (
        postgres_server() as server,
        running_cluster(
            root,
            model_dir,
            {**{name: paths[0] for name, paths in many.items()}, NAME: versions[0]},
            router={"port": 0, "management": True, "adapter_timeout_s": 8},
            adapter_limits={"max_rank": 8, "slots": SLOTS},
            residency={"host_bytes": IN_HOST_MEMORY * largest, "disk_bytes": NUM_ADAPTERS * largest},
            catalog={"url": PostgresDatabase(server, "catalog").url},
            store={"url": f"file://{root}/store"},
        ) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def fleet(managed: RunningCluster, many: dict[str, list[Path]], tmp_path_factory) -> Fleet:
    base, generator = BaseModel.read(managed.model_dir), random.Random(7)
    prompts = {name: tuple(generator.randrange(10, 600) for _ in range(generator.choice((3, 20, 80)))) for name in many}
    pairs = [(name, path) for name, paths in many.items() for path in paths]
    requests = [{"adapter": path, "prompt_ids": prompts[name], "max_new_tokens": NEW_TOKENS} for name, path in pairs]
    answers = run_reference(managed.model_dir, requests, tmp_path_factory.mktemp("reference"))
    revisions = {path: revision_id_of(read_adapter(path, base, Limits())) for _, path in pairs}
    expected = {(name, revisions[path]): each["tokens"] for (name, path), each in zip(pairs, answers, strict=True)}
    return Fleet(managed, many, prompts, revisions, expected)


@pytest.fixture(scope="module")
def pushed(managed: RunningCluster, versions: list[Path], tmp_path_factory) -> Pushed:
    base = BaseModel.read(managed.model_dir)
    ids = [revision_id_of(read_adapter(path, base, Limits())) for path in versions]
    requests = [{"adapter": path, "prompt_ids": PROMPT, "max_new_tokens": VERSION_TOKENS} for path in versions]
    answers = run_reference(managed.model_dir, requests, tmp_path_factory.mktemp("reference"))
    expected = {each: answer["tokens"] for each, answer in zip(ids, answers, strict=True)}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(versions)
    return Pushed(managed, versions, ids, expected)


async def request(fleet: Fleet, client: httpx.AsyncClient, name: str, leaves: bool) -> None:
    """One request, whose answer is checked. 404 is right only for an adapter that was deleted meanwhile."""
    deletions, pushed = fleet.deletions[name], fleet.latest.get(name, 0)
    was_deleted, may_have_been = name in fleet.deleted, name in fleet.may_be_deleted
    body = completion_body(name, fleet.prompts[name], max_tokens=NEW_TOKENS)
    url = f"{fleet.cluster.url}/v1/completions"
    if leaves:
        async with client.stream("POST", url, json={**body, "stream": True, "max_tokens": 200}) as answer:
            if answer.status_code == 200:
                async for _ in answer.aiter_lines():
                    fleet.seen["left"] += 1
                    return
        assert answer.status_code == 404
        return
    answer = await client.post(url, json=body)
    if answer.status_code == 404:
        assert may_have_been or fleet.deletions[name] > deletions, answer.text
        fleet.seen["not found"] += 1
        return
    assert answer.status_code == 200, answer.text
    assert not (was_deleted and fleet.deletions[name] == deletions and name in fleet.deleted), f"{name} is deleted"
    revision = answer.headers["x-prelude-revision"]
    known = [fleet.revisions[path] for path in fleet.directories[name]]
    assert known.index(revision) >= pushed, f"{name} answers as before its last push"
    assert answer.json()["choices"][0]["token_ids"] == fleet.expected[name, revision], (name, revision)
    fleet.seen["right"] += 1


async def push(fleet: Fleet, client: httpx.AsyncClient, name: str) -> None:
    path = fleet.directories[name][1]
    files = [("file", (each.name, each.read_bytes())) for each in sorted(path.iterdir())]
    while (answer := await client.post(f"{fleet.cluster.url}/v1/adapters/{name}/push", files=files)).status_code == 429:
        assert answer.json()["error"]["code"] == "too_many_uploads"
        await asyncio.sleep(0.1)
    if answer.status_code in (404, 409) and fleet.deletions[name]:
        return  # deleted meanwhile
    assert answer.status_code in (200, 201), answer.text
    assert answer.json()["revision"] == fleet.revisions[path]
    fleet.latest[name] = 1
    fleet.seen["pushed"] += 1


async def delete_for_a_while(fleet: Fleet, client: httpx.AsyncClient, name: str) -> None:
    if name in fleet.may_be_deleted:
        return
    fleet.deletions[name] += 1
    fleet.may_be_deleted.add(name)
    answer = await client.delete(f"{fleet.cluster.url}/v1/adapters/{name}")
    assert answer.status_code in (200, 204), answer.text
    fleet.deleted.add(name)
    fleet.seen["deleted"] += 1
    await asyncio.sleep(1)
    fleet.deleted.discard(name)  # from here on either answer may be right
    answer = await client.post(f"{fleet.cluster.url}/v1/adapters/{name}/restore", json={})
    assert answer.status_code in (200, 204), answer.text
    fleet.may_be_deleted.discard(name)


def test_requests_while_adapters_come_and_go(fleet: Fleet):
    generator = random.Random(8)
    names = list(fleet.directories)
    to_push = [name for name, paths in fleet.directories.items() if len(paths) > 1]
    generator.shuffle(to_push)
    # Some adapters are asked for often, most hardly ever.
    weights = [1 / (1 + place) for place in range(len(names))]
    generator.shuffle(weights)
    plan = [(generator.choices(names, weights)[0], generator.random() < 0.12) for _ in range(NUM_REQUESTS)]
    plan[:NUM_ADAPTERS] = [(name, False) for name in generator.sample(names, len(names))]  # each at least once
    generator.shuffle(plan)

    async def run() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client, asyncio.TaskGroup() as group:
            waiting = iter(enumerate(plan))

            async def work() -> None:
                for number, (name, leaves) in waiting:
                    if number % (NUM_REQUESTS // NUM_PUSHES) == 10:
                        group.create_task(push(fleet, client, to_push.pop()))
                    if number % 15 == 5:
                        group.create_task(delete_for_a_while(fleet, client, generator.choice(names)))
                    await request(fleet, client, name, leaves)

            for _ in range(AT_ONCE):
                group.create_task(work())

    asyncio.run(run())
    print(dict(fleet.seen))
    assert fleet.seen["right"] > 0.8 * NUM_REQUESTS
    assert fleet.seen["pushed"] >= NUM_PUSHES - 5
    assert fleet.seen["deleted"] > 10
    assert fleet.seen["left"] > 10


def is_evicted(control: WorkerControlStub, revision_id: str) -> bool:
    """From memory and disk; until it is copied to the disk, a worker refuses."""
    try:
        control.EvictAdapter(pb.EvictAdapterRequest(revision_id=revision_id, from_disk=True), timeout=30)
        return True
    except grpc.RpcError as error:
        if "being copied" not in (error.details() or ""):
            raise
    return False


def bytes_in(fleet: Fleet, tier: str) -> float:
    page = httpx.get(f"{fleet.cluster.worker_url(HOLDER)}/metrics").text
    families = {each.name: each for each in text_string_to_metric_families(page)}
    samples = families["prelude_worker_adapter_tier_bytes"].samples
    [found] = [each.value for each in samples if each.labels["tier"] == tier]
    return found


def mapped_files(process: psutil.Process) -> list[Path]:
    """The packed files that a process and its children have mapped."""
    found: list[Path] = []
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{each.pid}/maps").read_text().splitlines()
            found += [Path(line.split(maxsplit=5)[5]) for line in maps if "packed.safe" in line]
    return found


def test_nothing_is_left_of_them(fleet: Fleet):
    """After the tests above: budgets were kept, and what is told to go goes, down to the last mapping."""
    fleet.cluster.wait_idle(30)
    assert httpx.get(f"{fleet.cluster.admin_url}/debug/requests").json()["requests"] == []
    time.sleep(2 * fleet.cluster.config.residency.lease_s)  # of the tests above
    budget = fleet.cluster.config.residency
    for tier, limit in (("host", budget.host_bytes), ("disk", budget.disk_bytes)):
        assert 0 < bytes_in(fleet, tier) <= limit
    with fleet.cluster.control(HOLDER) as control:
        stream = control.WatchState(pb.WatchStateRequest(heartbeat_s=1), timeout=30)
        residency = next(stream).residency
        stream.cancel()
        assert residency.snapshot
        assert residency.resident
        mapped = mapped_files(fleet.cluster.engine(HOLDER))
        assert mapped
        (folder,) = {path.parents[1] for path in mapped}  # other clusters' workers of this name have their own
        for revision_id in {*residency.resident, *residency.on_disk}:
            wait_until(partial(is_evicted, control, revision_id))
    models = fleet.cluster.ask_engine(HOLDER, "GET", "/v1/models").json()["data"]
    assert [model["id"] for model in models if model.get("parent")] == []
    assert mapped_files(fleet.cluster.engine(HOLDER)) == []
    assert [bytes_in(fleet, tier) for tier in ("host", "disk")] == [0, 0]
    assert folder.is_dir()
    assert list(folder.glob("*/*")) == []


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
    assert pushed.cluster.metric("prelude_worker_memory_only_adapters{", HOLDER) == 2


def test_an_engine_that_is_stopped_gets_it_again(pushed: Pushed):
    """SIGSTOP: it is out of placement, then started again, and gets the adapter from its agent's memory.

    Nobody waits for it any longer. Until it is back requests are told to come again, not that the adapter is gone.
    """
    cluster, engine = pushed.cluster, pushed.cluster.engine(HOLDER)
    cluster.engine_parts(HOLDER)["scheduler"].suspend()
    stopped_at = time.monotonic()
    assert pushed.ask().status_code in (502, 503)
    waited_s = time.monotonic() - stopped_at
    assert waited_s < OUT_WITHIN_S
    out_s = waited_s + wait_until(lambda: not is_ready(f"{cluster.worker_url(HOLDER)}/ready"), OUT_WITHIN_S - waited_s)
    assert "has shown no progress" in (cluster.logs / f"{HOLDER}.log").read_text()
    cluster.wait_for_another(lambda: cluster.engine(HOLDER), engine.pid, RESTARTED_WITHIN_S - out_s)
    statuses: Counter[int] = Counter()
    deadline = time.monotonic() + BACK_WITHIN_S
    while (answer := pushed.ask()).status_code != 200 and time.monotonic() < deadline:
        statuses[answer.status_code] += 1
        time.sleep(0.2)
    assert pushed.check(answer) == 2
    assert statuses, "the engine was not missed"
    assert statuses.keys() <= {502, 503}
    cluster.wait_ready(BACK_WITHIN_S)
    with pushed.traffic():
        time.sleep(1)
    assert pushed.on_disk() == {0}


def test_an_agent_that_is_killed_takes_it_along(pushed: Pushed):
    """Requests are told that it is gone, an earlier one is served after rollbacks, and the push can be made again."""
    engine = pushed.cluster.engine(HOLDER)
    pushed.cluster.process(HOLDER).kill()
    psutil.wait_procs([engine], timeout=30)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE  # it dies with its agent
    away = pushed.ask()
    assert away.status_code in (502, 503), away.text
    assert "retry-after" in away.headers
    pushed.cluster.wait_ready(BACK_WITHIN_S)
    answer = pushed.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "adapter_revision_gone"), answer.text
    assert "retry-after" not in answer.headers
    assert f"`prelude adapters rollback {NAME}@ALIAS`" in answer.json()["error"]["message"]
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
