"""A load of real engines turns from answers to prompts: the router changes roles, and every answer is right.

With mutual TLS, so that the router proves that it may ask for a change.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.clusters.certificates import of_changing_workers
from support.clusters.running_cluster import ENGINE, RunningCluster, running_cluster, sum_of
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases

from cluster.control import control_pb2 as pb

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

WORKERS = {"prefill": {"role": "prefill", "replicas": 2}, "decode": {"role": "decode", "replicas": 2}}
NUM_CLIENTS = 24
ANSWER_TOKENS, SHORT_ANSWER_TOKENS = 200, 4


async def ask_until(cluster: RunningCluster, cases: list[Case], num_tokens: int, is_over: Callable[[str], bool]) -> int:
    """Clients that ask without pause until the router's metrics say that it is over. Returns how many were answered."""
    turns, over, num_answers = itertools.cycle(cases), asyncio.Event(), 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal num_answers
        while not over.is_set():
            case = next(turns)
            body = completion_body(case.adapter, case.prompt_ids, max_tokens=num_tokens)
            answer = await http.post(f"{cluster.url}/v1/completions", json=body)
            assert answer.status_code == 200, f"{case.name}: {answer.text}"
            check_tokens(case, answer.json())
            num_answers += 1

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=180, limits=limits) as http,
        asyncio.TaskGroup() as group,
        asyncio.timeout(300),
    ):
        for _ in range(NUM_CLIENTS):
            group.create_task(client(http))
        while not is_over((await http.get(f"{cluster.admin_url}/metrics")).text):  # noqa: ASYNC110 it tells nobody
            await asyncio.sleep(0.5)
        over.set()
    return num_answers


def roles(cluster: RunningCluster) -> list[int]:
    return sorted(cluster.describe(name).role for name in cluster.config.workers)


def test_roles_follow_a_load_that_turns(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    some = {"a0": adapters["a0"]}
    engine = {**ENGINE, "max_running_requests": 8}
    names = [f"{name}-{number}" for name in WORKERS for number in range(2)]
    sections = {
        "workers": WORKERS,
        "engine": engine,
        "role_changes": "auto",
        "tls": of_changing_workers(tmp_path, names),
    }
    with running_cluster(tmp_path, model_dir, some, **sections) as cluster:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        short = itertools.product((None, "a0"), random_prompts(3, 8, 20))
        long = itertools.product((None, "a0"), random_prompts(4, 900, 1200, 1500))
        answering = reference_cases(model_dir, tmp_path / "a", some, short, ANSWER_TOKENS)
        reading = reference_cases(model_dir, tmp_path / "b", some, long, SHORT_ANSWER_TOKENS)

        def has_become(role: str, times: int = 1) -> Callable[[str], bool]:
            other = "decode" if role == "prefill" else "prefill"
            series = f'prelude_router_role_changes_total{{from="{other}",result="done",to="{role}"}}'
            ready = f'prelude_router_workers_placeable{{role="{role}"}}'
            return lambda page: sum_of(page, series) >= times and sum_of(page, ready) == 3

        for cases, num_tokens, role in (
            (answering, ANSWER_TOKENS, "decode"),
            (reading, SHORT_ANSWER_TOKENS, "prefill"),
        ):
            began = time.monotonic()
            is_over = has_become(role, 1 if role == "decode" else 2)
            num_answers = asyncio.run(ask_until(cluster, cases, num_tokens, is_over))
            print(
                f"{num_answers} right answers until there were three {role} workers: {time.monotonic() - began:.0f} s"
            )
            assert num_answers > NUM_CLIENTS
        assert roles(cluster) == [pb.ROLE_PREFILL] * 3 + [pb.ROLE_DECODE]
        print(httpx.get(f"{cluster.admin_url}/console/state").json()["role_change"])
        with cluster.control("decode-0") as control:
            load = next(control.WatchState(pb.WatchStateRequest(), timeout=10)).load
        assert load.decode_us / load.decode_steps > 100  # a step's microseconds
        cluster.check_no_engine_ended()
