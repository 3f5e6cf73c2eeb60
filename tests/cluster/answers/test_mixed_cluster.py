"""A pair beside a unified worker, as `prelude init --with-all-positions` writes them: adapters of both kinds.

A cluster of its own.
"""

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml
from support.adapters.random_adapters import write_random_lora
from support.clusters.running_cluster import CHUNK_TOKENS, RunningCluster, is_ready, running_cluster, sum_of
from support.engines.parity import Case, check_tokens, completion_body, random_prompts, reference_cases
from support.logged_process import logged_process
from support.waiting import wait_until

from adapters.model.base_model import BaseModel
from cli.main import main
from process.free_ports import free_port

PAIR, UNIFIED = "prefill-0>decode-0", "unified-0"
POSITIONS = {"prompt-only": "prefill", "everywhere": "all"}
DEBUG = {"x-prelude-debug": "placement"}

NUM_STREAMS, STREAM_TOKENS = 4, 1900

pytestmark = pytest.mark.long


def set_drained(cluster: RunningCluster, worker: str, is_drained: bool) -> None:
    config = str(cluster.logs.parent / "cluster.yaml")
    main(["workers", "drain" if is_drained else "undrain", worker, "--config", config])


@contextlib.contextmanager
def router_with_objective(cluster: RunningCluster, folder: Path, event_gap_s: float) -> Iterator[tuple[str, str]]:
    """One more router of the cluster; its URL, and that of its admin listener."""
    ports, path = [free_port(), free_port()], folder / f"router-{event_gap_s:g}.yaml"
    data = yaml.safe_load((cluster.logs.parent / "cluster.yaml").read_text())
    slo = {"first_token_s": 1.0, "event_gap_s": event_gap_s}
    data["router"] |= {"port": ports[0], "admin": {"port": ports[1]}, "slo": slo}
    path.write_text(yaml.safe_dump(data))
    url, admin_url = (f"http://127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "cli.main", "router", "--config", path]
    with logged_process(command, path.with_suffix(".log"), signal.SIGTERM):
        wait_until(lambda: is_ready(f"{url}/ready"))
        yield url, admin_url


@contextlib.contextmanager
def held_streams(url: str, prompts: list[tuple[int, ...]]) -> Iterator[None]:
    """Answers that the unified worker generates meanwhile. Their prompts are read."""
    streams = []  # an iterator that is forgotten closes its connection
    with httpx.Client(timeout=120) as http, contextlib.ExitStack() as stack:
        for prompt in prompts:
            body = completion_body("prompt-only", prompt, max_tokens=STREAM_TOKENS, ignore_eos=True, stream=True)
            answer = stack.enter_context(http.stream("POST", f"{url}/v1/completions", json=body, headers=DEBUG))
            assert answer.headers["x-prelude-placement"].startswith(UNIFIED)
            streams.append(answer.iter_raw())
            assert b"data: " in next(streams[-1])
        yield


@pytest.fixture(scope="module")
def directories(model_dir: Path, tmp_path_factory) -> dict[str, Path]:
    """The same weights, for the positions that each one's name says."""
    base, root = BaseModel.read(model_dir), tmp_path_factory.mktemp("adapters")
    return {
        name: write_random_lora(root / name, base, 40, config={"prelude": {"positions": positions}})
        for name, positions in POSITIONS.items()
    }


@pytest.fixture(scope="module")
def mixed(model_dir: Path, directories: dict[str, Path], tmp_path_factory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("mixed")
    path = folder / "written.yaml"
    main(["init", "--model", str(model_dir), "--gpus", "0", "--with-all-positions", "--config", str(path)])
    written = yaml.safe_load(path.read_text())
    sections = {name: written[name] for name in ("workers", "adapter_limits", "residency")}
    with running_cluster(
        folder, model_dir, directories, router={"port": 0, "debug_header": True}, **sections
    ) as cluster:
        yield cluster


@pytest.mark.parametrize(("event_gap_s", "expected"), [(1e-6, PAIR), (1000.0, UNIFIED)])
def test_the_objective_decides_whether_a_worker_that_generates_reads_a_prompt(
    mixed: RunningCluster, tmp_path: Path, event_gap_s: float, expected: str
) -> None:
    """A prompt is for the unified worker, which has most of it in its prefix cache, unless its streams may not wait."""
    prompt, *others = random_prompts(round(event_gap_s) + 1, 300, *[20] * (NUM_STREAMS + 1))

    with router_with_objective(mixed, tmp_path, event_gap_s) as (url, admin_url):

        def placements(count: int, prompt: tuple[int, ...] = prompt) -> set[str]:
            body = completion_body("prompt-only", prompt, max_tokens=2)
            answers = [httpx.post(f"{url}/v1/completions", json=body, headers=DEBUG, timeout=120) for _ in range(count)]
            return {answer.headers["x-prelude-placement"].partition(" ")[0] for answer in answers}

        def drain(worker: str, is_drained: bool) -> None:
            set_drained(mixed, worker, is_drained)
            series = f'prelude_router_workers_placeable{{role="{worker.removesuffix("-0")}"}}'
            wait_until(lambda: sum_of(httpx.get(f"{admin_url}/metrics").text, series) == (not is_drained))

        drain(UNIFIED, True)
        assert placements(1, others.pop()) == {PAIR}  # so that both have the adapter
        drain(UNIFIED, False)
        drain("prefill-0", True)
        assert placements(2) == {UNIFIED}
        with held_streams(url, others):
            drain("prefill-0", False)
            assert placements(3) == {expected}
            num_running, _, _ = mixed.loads()[UNIFIED]
            assert num_running == NUM_STREAMS, "they ended before they were counted"


def test_each_adapter_is_served_at_its_positions(
    mixed: RunningCluster, directories: dict[str, Path], tmp_path: Path
) -> None:
    """Token by token, one at a time and all at once; then the unified worker has both kinds in its batches."""
    asked = itertools.product(POSITIONS, random_prompts(6, 9, CHUNK_TOKENS + 5))
    cases = reference_cases(mixed.model_dir, tmp_path, directories, asked)
    assert cases[0].reference["tokens"] != cases[2].reference["tokens"], "the positions make no difference"

    def served_by(case: Case) -> str:
        body = completion_body(case.adapter, case.prompt_ids)
        answer = httpx.post(f"{mixed.url}/v1/completions", json=body, headers=DEBUG, timeout=120)
        assert answer.status_code == 200, f"{case.name}: {answer.text}"
        check_tokens(case, answer.json())
        placement, _, _ = answer.headers["x-prelude-placement"].partition(" ")
        assert placement == UNIFIED if case.adapter == "everywhere" else placement in (PAIR, UNIFIED), case.name
        return placement

    with ThreadPoolExecutor(len(cases)) as threads:
        for case in cases:
            served_by(case)
        list(threads.map(served_by, 3 * cases))
        main(["workers", "drain", "prefill-0", "--config", str(mixed.logs.parent / "cluster.yaml")])
        assert set(threads.map(served_by, 3 * cases)) == {UNIFIED}
