"""Workers of a cluster become prefill and decode workers in turns, under load: no request is lost or wrong.

With mutual TLS between all, so that a worker proves in each role that it may have it. Engines listen beyond loopback,
where this host has an address, so that TLS is theirs, too.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clusters.certificates import of_changing_workers
from support.clusters.running_cluster import RunningCluster, own_address, running_cluster
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases
from support.engines.running_engine import START_TIMEOUT_S

from cluster.control import control_pb2 as pb
from engine.hooks.report import REPORT_DIR_VARIABLE, read_reports

pytestmark = pytest.mark.timeout(1800)

WORKERS = {"prefill-0": {"role": "prefill"}, "prefill-1": {"role": "prefill"}, "decode-0": {"role": "decode"}}

# Of a change; that of the KV manager is within the switch of the engine.
PARTS = (
    "agent_replaced_s",
    "adapters_unloaded_s",
    "engine_switched_s",
    "kv_manager_ended_s",
    "agent_started_s",
    "warmed_up_s",
)


@pytest.fixture(scope="module")
def changing(tmp_path_factory, model_dir: Path, adapters: dict[str, Path]) -> Iterator[RunningCluster]:
    few = {name: adapters[name] for name in ("a0", "reft")}
    router = {"port": 0, "debug_header": True}
    root, host = tmp_path_factory.mktemp("changing"), own_address() or "127.0.0.1"
    workers = {name: {**worker, "host": host} for name, worker in WORKERS.items()}
    sections = {"workers": workers, "role_changes": "manual", "tls": of_changing_workers(root, workers)}
    with running_cluster(root, model_dir, few, router=router, **sections) as running:
        yield running


@pytest.fixture(scope="module")
def cases(tmp_path_factory, changing: RunningCluster) -> list[Case]:
    asked = itertools.product((None, *changing.adapters), random_prompts(9, 9, 150))
    return reference_cases(changing.model_dir, tmp_path_factory.mktemp("reference"), changing.adapters, asked)


class Load:
    """Clients that ask without pause, and hold each answer against the reference."""

    def __init__(self, url: str, cases: list[Case]) -> None:
        self.url, self.cases = url, itertools.cycle(cases)
        self.placements: list[str] = []  # of the answers, each "prefill>decode"
        self.answered = asyncio.Event()
        self.is_over = False

    async def ask(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            case = next(self.cases)
            body = completion_body(case.adapter, case.prompt_ids)
            answer = await client.post(self.url, json=body, headers={"x-prelude-debug": "placement"})
            assert answer.status_code == 200, f"{case.name}: {answer.text}"
            check_tokens(case, answer.json())
            self.placements.append(answer.headers["x-prelude-placement"].partition(" ")[0])
            self.answered.set()

    async def answer_of(self, worker: str) -> None:
        """Wait for an answer to a request that comes from now on, in which the worker takes part."""
        seen = len(self.placements)
        async with asyncio.timeout(60):
            while not any(worker in each.split(">") for each in self.placements[seen:]):
                self.answered.clear()
                await self.answered.wait()


async def change_roles(cluster: RunningCluster, cases: list[Case], times: int) -> None:
    """Under load, change random workers so that each role is there; each serves in its new role before the next one."""
    print(f"seed {(seed := random.randrange(1 << 30))}")
    generator, seconds = random.Random(seed), []
    roles = {name: await asyncio.to_thread(role_of, cluster, name) for name in WORKERS}
    load = Load(f"{cluster.url}/v1/completions", cases)
    async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as group:
        clients = [group.create_task(load.ask(client)) for _ in range(3)]
        for _ in range(times):
            name = generator.choice([name for name, role in roles.items() if [*roles.values()].count(role) > 1])
            roles[name] = "decode" if roles[name] == "prefill" else "prefill"
            began = time.monotonic()
            await asyncio.to_thread(change, cluster, name, roles[name])
            drained = time.monotonic()
            await load.answer_of(name)
            seconds.append((drained - began, time.monotonic() - drained))
        load.is_over = True
        await asyncio.wait(clients)
    for what, found in zip(("to be idle", "to serve"), map(sorted, zip(*seconds, strict=True)), strict=True):
        print(f"{times} changes, {what}: {found[0]:.2f} to {found[-1]:.2f} s, half within {found[times // 2]:.2f} s")


def role_of(cluster: RunningCluster, name: str) -> str:
    return pb.Role.Name(cluster.describe(name).role).removeprefix("ROLE_").lower()


def log_lines(cluster: RunningCluster, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cluster.logs / f"{name}.log").read_text().splitlines() if line[:1] == "{"]


def change(cluster: RunningCluster, name: str, role: str) -> None:
    with cluster.control(name) as control:
        control.ChangeRole(pb.ChangeRoleRequest(role=f"ROLE_{role.upper()}", deadline_s=60), timeout=70)


def test_requests_go_on_over_changes(changing: RunningCluster, cases: list[Case]) -> None:
    asyncio.run(change_roles(changing, cases, 4))
    changing.check_no_engine_ended()
    changes = [line for name in WORKERS for line in log_lines(changing, name) if line["message"] == "role changed"]
    assert len(changes) == 4
    for each in changes:
        seconds = {part: each[part] for part in PARTS}
        print(each["process"], each["role"], seconds)
        assert 0 < seconds["kv_manager_ended_s"] < seconds["engine_switched_s"]
    for name in WORKERS:
        reports = read_reports(Path(changing.engine(name).environ()[REPORT_DIR_VARIABLE]))
        [report] = [each for each in reports if each.process == "scheduler-0"]
        assert (report.role, report.num_adapters) == (role_of(changing, name), 0)  # when it began the role


def test_an_engine_that_ends_meanwhile_is_started_in_its_new_role(changing: RunningCluster, cases: list[Case]) -> None:
    roles = {name: role_of(changing, name) for name in WORKERS}
    name = next(name for name, role in roles.items() if list(roles.values()).count(role) > 1)
    new = "decode" if roles[name] == "prefill" else "prefill"
    change(changing, name, new)
    changing.engine(name).kill()  # its agent is about to be replaced
    changing.wait_ready(START_TIMEOUT_S)
    assert role_of(changing, name) == new
    asyncio.run(change_roles(changing, cases, 1))
