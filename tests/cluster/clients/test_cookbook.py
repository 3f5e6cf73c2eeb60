"""Recipes of the Tinker cookbook, unmodified, and the loop on the page: rewards rise.

They train the demo's model and sample it from a unified worker. The cookbook is installed below .prelude/, once; torch,
transformers and the SDK are those of this environment. What the recipes would download lies in folders of these names.
"""

import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clusters.pretrained_model import needs_pretrained
from support.clusters.running_cluster import RunningCluster, running_cluster
from support.ports import two_ports

ROOT = Path(__file__).parents[3]
INSTALLED = ROOT / ".prelude" / "clients" / "cookbook"
NEEDS = ("chz==0.4.0", "blobfile==3.3.0", "datasets==5.2.0", "termcolor==3.3.0", "tiktoken==0.14.0", "pylatexenc==2.11")
MODEL = "Qwen/Qwen3-8B-Base"  # for which the cookbook chooses plain text as chat format
QUESTION, SUFFIX = "How many are there?", r" Provide a numerical answer without units, written inside \boxed{}."
SHOWN = (  # how rl_loop begins
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    r"We have r's at positions 3, 8, and 9. \boxed{3}"
)
BATCH, STEPS = 16, 20
pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), needs_pretrained]


@pytest.fixture(scope="module")
def python() -> Path:
    """Of the environment with the cookbook, which reads the packages of this one, too, after its own."""
    found, whole = INSTALLED / "bin" / "python", INSTALLED / "whole"
    if not whole.exists():
        venv.create(INSTALLED, clear=True, with_pip=True)
        for words in (NEEDS, ("--no-deps", "tinker-cookbook==0.6.1")):
            done = subprocess.run([found, "-m", "pip", "install", "-q", *words], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(done.stderr[-500:])
        next(INSTALLED.glob("lib/*/site-packages")).joinpath("others.pth").write_text(sysconfig.get_path("purelib"))
        whole.touch()
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    root = tmp_path_factory.mktemp("cookbook")
    subprocess.run([sys.executable, "-m", "cli.main", "demo", root / "demo"], check=True)
    sections: dict[str, Any] = {
        "router": {"port": 0, "management": True},
        "store": {"url": f"file://{root}/store"},
        "trainer": {"url": f"http://127.0.0.1:{two_ports()}", "folder": str(root / "trainer"), "model_name": MODEL},
        "workers": {"unified-0": {"role": "unified"}},
    }
    with running_cluster(root, root / "demo" / "model", {}, **sections) as cluster:
        yield cluster


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, path.read_text().splitlines()))


def test_sl_loop_and_rl_loop(served: RunningCluster, python: Path, tmp_path: Path):
    def run(recipe: str, **fields: Any) -> Path:
        log, own = tmp_path / recipe, {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        fields |= {"base_url": served.url, "model_name": MODEL, "log_path": log, "lora_rank": 8, "save_every": 5}
        words = [f"{name}={value}" for name, value in fields.items()]
        command = [python, "-m", f"tinker_cookbook.recipes.{recipe}", *words]
        environment = {**os.environ, **own, "TINKER_API_KEY": "tml-default"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return log

    chosen = random.Random(0)
    asked = {"role": "user", "content": QUESTION + SUFFIX}
    answers = [{"role": "assistant", "content": rf"\boxed{{{chosen.choice('12345')}}}"} for _ in range(8 * BATCH)]
    first = {"role": "user", "content": f"How many r's are in strawberry?{SUFFIX}"}
    shown = {"role": "assistant", "content": SHOWN}
    rows = [{"messages": [first, shown, asked, each]} for each in answers]
    write_rows(tmp_path / "HuggingFaceH4" / "no_robots" / "train.jsonl", rows)
    gsm8k = tmp_path / "openai" / "gsm8k"
    write_rows(gsm8k / "train.jsonl", [{"question": QUESTION, "answer": "#### 3"}] * STEPS)
    files = "data_files: [{split: train, path: train.jsonl}]"
    (gsm8k / "README.md").write_text(f"---\nconfigs: [{{config_name: main, {files}}}]\n---\n")
    (tmp_path / "Qwen").mkdir()
    (tmp_path / MODEL).symlink_to(served.model_dir)

    learned = run("sl_loop", batch_size=BATCH, learning_rate=2e-3, train_on_what="last_assistant_message")
    losses = [line["train_mean_nll"] for line in lines_of(learned / "metrics.jsonl") if "train_mean_nll" in line]
    assert losses[-1] < 0.5 * losses[0]
    write_rows(
        tmp_path / "rl_loop" / "checkpoints.jsonl", [{**lines_of(learned / "checkpoints.jsonl")[-1], "batch": 0}]
    )
    log = run(
        "rl_loop", batch_size=1, group_size=BATCH, max_tokens=8, learning_rate=1e-3, loss_fn="importance_sampling"
    )
    rewards = [line["reward/total"] for line in lines_of(log / "metrics.jsonl") if "reward/total" in line]
    assert len(rewards) == STEPS
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.5, rewards  # from a fifth on, within a few steps


def test_the_loop_of_the_page(served: RunningCluster, capsys: pytest.CaptureFixture[str]):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training-service.md").read_text(), re.DOTALL)
    assert code.count("\n") <= 20
    for shown, here in (("http://127.0.0.1:8000", served.url), ('"demo"', f'"{MODEL}"')):
        assert shown in code
        code = code.replace(shown, here)
    exec(code.replace(".prelude/demo/model", str(served.model_dir)), {})
    rewards = list(map(float, capsys.readouterr().out.split()))
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 1, rewards
