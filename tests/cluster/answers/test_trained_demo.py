"""The demo of `prelude demo`, made once and served by a pair: its adapters choose a style, and offline evaluation says
what the pair does, prompt for prompt.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.training.served_answers import compared_answers

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, what was told while it was made)"""
    folder = tmp_path_factory.mktemp("trained") / "demo"
    command = [sys.executable, "-m", "cli.main", "demo", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{folder}/cluster.yaml\n"
    return folder, done.stderr


@pytest.fixture(scope="module")
def served(demo: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder, _ = demo
    named = yaml.safe_load((folder / "cluster.yaml").read_text())["adapters"]
    adapters = {name: folder / each["path"] for name, each in named.items()}
    with running_cluster(tmp_path_factory.mktemp("served"), folder / "model", adapters) as cluster:
        yield cluster


def test_adapters_reach_what_the_base_does_not(demo: tuple[Path, str]):
    _, told = demo
    print(told)
    [(with_words, without)] = re.findall(
        r"base model: ([\d.]+) of held-out answers exact with control words, ([\d.]+) without\n", told
    )
    assert float(with_words) >= 0.9
    assert float(without) <= 0.2
    exact = {name: float(part) for name, part in re.findall(r"adapter (\S+) \(\w+\): ([\d.]+) exact", told)}
    assert len(exact) == 8
    assert {name: part for name, part in exact.items() if part < 0.9} == {}


def test_a_pair_answers_as_offline_evaluation_does(demo: tuple[Path, str], served: RunningCluster):
    """100 questions of the base model, of a LoRA and of a DiReFT, prompt for prompt."""
    folder = demo[0]
    for name in ("shout", "json-direft"):
        data = folder / "data" / f"{name.partition('-')[0]}-held-out.jsonl"
        asked = [None, (name, served.adapters[name])]
        without, adapted = compared_answers(served.url, folder / "model", data, asked)
        assert len(without.served) == len(adapted.served) == 100
        assert without.served == without.offline
        assert adapted.served == adapted.offline
        assert without.exact_match <= 0.2
        assert adapted.exact_match >= 0.9
        assert without.revisions == {None}
        assert len(adapted.revisions) == 1
