"""The demo of `prelude demo`, made once and served by a pair: its adapters choose a style, and offline evaluation says
what the pair does, prompt for prompt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from support.running_cluster import RunningCluster, running_cluster

from training.data.examples import Example, load_sft
from training.data.tokens import Encoder
from training.runs.base import LoadedBase, load_base
from training.runs.evaluation import evaluate_base, evaluate_directory

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
MAX_TOKENS = 512


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


@pytest.fixture(scope="module")
def base(demo: tuple[Path, str]) -> LoadedBase:
    return load_base(demo[0] / "model", "float32", "cpu")


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


@pytest.mark.parametrize("name", ["shout", "json-direft"])
def test_a_pair_answers_as_offline_evaluation_does(
    demo: tuple[Path, str], base: LoadedBase, served: RunningCluster, name: str
):
    rows = HeldOut.read(demo[0], base, name.partition("-")[0])
    offline = evaluate_directory(base.model, base.tokenizer, rows.examples, served.adapters[name])
    assert len(offline.turns) == 100
    assert offline.exact_match >= 0.9
    assert rows.answers(served, name) == [turn.given for turn in offline.turns]


def test_without_an_adapter_the_pair_answers_plainly(demo: tuple[Path, str], base: LoadedBase, served: RunningCluster):
    rows = HeldOut.read(demo[0], base, "shout")
    offline = evaluate_base(base.model, base.tokenizer, rows.examples)
    assert offline.exact_match <= 0.2
    assert rows.answers(served, None) == [turn.given for turn in offline.turns]


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of one style, each a question and its answer."""

    questions: list[str]
    examples: tuple[Example, ...]

    @classmethod
    def read(cls, folder: Path, base: LoadedBase, style: str) -> HeldOut:
        path = folder / "data" / f"{style}-held-out.jsonl"
        questions = [json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()]
        return cls(questions, load_sft([path], Encoder(base.tokenizer, base.ends), MAX_TOKENS).examples)

    def answers(self, cluster: RunningCluster, adapter: str | None) -> list[str]:
        """What the cluster answers, at most as many tokens as are expected; several questions are in flight at once."""
        chosen = {} if adapter is None else {"adapter": adapter}

        def ask(question: str, example: Example) -> str:
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": len(example.turns[0].answers[0]),
                **chosen,
            }
            answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["message"]["content"]

        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(ask, self.questions, self.examples))
