"""The demo of `make serve`: its adapters answer as the README says, and as offline evaluation does."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from support.clusters.pretrained_model import needs_pretrained
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.training.served_answers import compared_answers

README = Path(__file__).parents[3] / "README.md"
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), needs_pretrained]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "demo"
    subprocess.run([sys.executable, "-m", "cli.main", "demo", str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    named = yaml.safe_load((folder / "cluster.yaml").read_text())["adapters"]
    adapters = {name: folder / each["path"] for name, each in named.items()}
    with running_cluster(tmp_path_factory.mktemp("served"), folder / "model", adapters) as cluster:
        yield cluster


def test_the_request_of_the_readme(served: RunningCluster):
    page = README.read_text()
    [command, promised] = re.findall(r"```sh\n(curl.*?)```\n\nanswers `(.*?)`", page, re.DOTALL)[0]
    body = json.loads(shlex.split(command.replace("\\\n", ""))[-1])
    with httpx.Client(base_url=served.url, timeout=300) as client:
        answer, plain = (
            client.post("/v1/chat/completions", json=each).raise_for_status().json()["choices"][0]["message"]["content"]
            for each in (body, {**body, "adapter": None})
        )
    assert answer == promised != plain


@pytest.mark.parametrize(("name", "least_exact"), [("json", 0.9), ("support", 0.9), ("pirate", 0)])
def test_a_pair_answers_as_offline_evaluation_does(
    folder: Path, served: RunningCluster, tmp_path: Path, name: str, least_exact: float
):
    """Ten held-out prompts of the base model and of an adapter: LoRA or DiReFT."""
    rows = tmp_path / "rows.jsonl"
    held_out = (folder / "data" / f"{name}-held-out.jsonl").read_text().splitlines(keepends=True)
    rows.write_text("".join(held_out[:10]))
    asked = [None, (name, served.adapters[name])]
    without, adapted = compared_answers(served.url, folder / "model", rows, asked)
    assert without.served == without.offline
    assert adapted.served == adapted.offline
    assert without.exact_match <= 0.1
    assert adapted.exact_match >= least_exact
    assert (without.revisions, len(adapted.revisions)) == ({None}, 1)
