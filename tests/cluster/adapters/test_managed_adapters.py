"""A thousand requests over two hundred adapters while adapters are deleted, restored and pushed, and clients leave.

Slots for 8, host memory for 32, the catalog in PostgreSQL. Every answer is held against the reference for the revision
that its header names. At the end nothing is left of any adapter. A cluster of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.adapters.catalog_databases import PostgresDatabase, postgres_server
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.engines.parity import completion_body
from support.engines.reference_answers import run_reference

from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.packed import write_packed
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from prefill_worker.residency.tiers.host_memory import room_bytes

NUM_ADAPTERS, NUM_PUSHES, NUM_REQUESTS = 100, 20, 500
SLOTS, IN_HOST_MEMORY, AT_ONCE = 8, 16, 16
NEW_TOKENS = 8
EVICTION_S = 30


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

    @property
    def worker(self) -> str:
        return "prefill-0"

    @contextlib.contextmanager
    def control(self) -> Iterator[WorkerControlStub]:
        worker = self.cluster.config.workers[self.worker]
        with grpc.insecure_channel(f"{worker.host}:{worker.control_port}") as channel:
            yield WorkerControlStub(channel)


def write_adapter(folder: Path, base: BaseModel, seed: int) -> Path:
    """LoRA and ReFT of several ranks and places."""
    if seed % 4 == 3:
        return write_random_reft(folder, base, seed, rank=1 + seed % 4, layers=(seed % 2, 2))
    modules = (("q_proj", "v_proj"), ("o_proj", "down_proj"), ("k_proj", "up_proj", "gate_proj"))[seed % 3]
    return write_random_lora(folder, base, seed, modules=modules, rank=(4, 8)[seed % 2])


@pytest.fixture(scope="module")
def fleet(model_dir: Path, tmp_path_factory):
    base, root, generator = BaseModel.read(model_dir), tmp_path_factory.mktemp("many"), random.Random(7)
    directories: dict[str, list[Path]] = {}
    for number in range(NUM_ADAPTERS + NUM_PUSHES):
        name = f"adapter-{number % NUM_ADAPTERS}"
        directories.setdefault(name, []).append(write_adapter(root / str(number), base, 1000 + number))
    prompts = {
        name: tuple(generator.randrange(10, 600) for _ in range(generator.choice((3, 20, 80)))) for name in directories
    }
    pairs = [(name, path) for name, paths in directories.items() for path in paths]
    requests = [{"adapter": path, "prompt_ids": prompts[name], "max_new_tokens": NEW_TOKENS} for name, path in pairs]
    answers = run_reference(model_dir, requests, root)
    revisions = {path: revision_id_of(read_adapter(path, base, Limits())) for _, path in pairs}
    largest = 0  # bytes of an adapter in host memory, of the first twelve: the others are of the same shapes
    for number, path in enumerate(paths[0] for paths in list(directories.values())[:12]):
        write_packed(read_adapter(path, base, Limits()), base, "float32", root / f"packed-{number}")
        largest = max(largest, room_bytes((root / f"packed-{number}").stat().st_size))
    with postgres_server() as server:
        database = PostgresDatabase(server, "catalog")
        with running_cluster(
            root,
            model_dir,
            {name: paths[0] for name, paths in directories.items()},
            router={"port": 0, "management": True, "adapter_timeout_s": 8},
            adapter_limits={"max_rank": 8, "slots": SLOTS},
            residency={"host_bytes": IN_HOST_MEMORY * largest, "disk_bytes": 100 * largest},
            catalog={"url": database.url},
            store={"url": f"file://{root}/store"},
        ) as cluster:
            expected = {
                (name, revisions[path]): answer["tokens"] for (name, path), answer in zip(pairs, answers, strict=True)
            }
            yield Fleet(cluster, directories, prompts, revisions, expected)


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
    plan = [(generator.choices(names, weights)[0], generator.random() < 0.06) for _ in range(NUM_REQUESTS)]
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
                    if number % 30 == 20:
                        group.create_task(delete_for_a_while(fleet, client, generator.choice(names)))
                    await request(fleet, client, name, leaves)

            for _ in range(AT_ONCE):
                group.create_task(work())

    asyncio.run(run())
    print(dict(fleet.seen))
    assert fleet.seen["right"] > 0.85 * NUM_REQUESTS
    assert fleet.seen["pushed"] >= NUM_PUSHES - 5
    assert fleet.seen["deleted"] > 10
    assert fleet.seen["left"] > 10


def evict(control: WorkerControlStub, revision_id: str) -> None:
    """From memory and disk; once it is copied to the disk, until when a worker refuses."""
    deadline = time.monotonic() + EVICTION_S
    while True:
        try:
            control.EvictAdapter(pb.EvictAdapterRequest(revision_id=revision_id, from_disk=True), timeout=30)
            return
        except grpc.RpcError as error:
            if "being copied" not in (error.details() or "") or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def metrics_of(fleet: Fleet) -> dict[tuple[str, str], float]:
    """(name, tier) -> value of the worker's gauges."""
    page = httpx.get(f"{fleet.cluster.worker_url(fleet.worker)}/metrics").text
    return {
        (sample.name, sample.labels.get("tier", "")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


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
    deadline = asyncio.run(idle(fleet))
    assert deadline, fleet.cluster.loads()
    assert httpx.get(f"{fleet.cluster.admin_url}/debug/requests").json()["requests"] == []
    time.sleep(2 * fleet.cluster.config.residency.lease_s)  # of the tests above
    gauges, budget = metrics_of(fleet), fleet.cluster.config.residency
    for tier, limit in (("host", budget.host_bytes), ("disk", budget.disk_bytes)):
        assert 0 < gauges["prelude_worker_adapter_tier_bytes", tier] <= limit
    with fleet.control() as control:
        stream = control.WatchState(pb.WatchStateRequest(heartbeat_s=1), timeout=30)
        residency = next(stream).residency
        stream.cancel()
        assert residency.snapshot
        assert residency.resident
        mapped = mapped_files(fleet.cluster.engine(fleet.worker))
        assert mapped
        (folder,) = {path.parents[1] for path in mapped}  # other clusters' workers of this name have their own
        for revision_id in {*residency.resident, *residency.on_disk}:
            evict(control, revision_id)
    models = fleet.cluster.ask_engine(fleet.worker, "GET", "/v1/models").json()["data"]
    assert [model["id"] for model in models if model.get("parent")] == []
    assert mapped_files(fleet.cluster.engine(fleet.worker)) == []
    gauges = metrics_of(fleet)
    for tier in ("host", "disk"):
        assert gauges["prelude_worker_adapter_tier_bytes", tier] == 0
    assert folder.is_dir()
    assert list(folder.glob("*/*")) == []


async def idle(fleet: Fleet) -> bool:
    """Wait until no engine has a request."""
    for _ in range(100):
        if all(load == (0, 0, 0) for load in (await asyncio.to_thread(fleet.cluster.loads)).values()):
            return True
        await asyncio.sleep(0.1)
    return False
