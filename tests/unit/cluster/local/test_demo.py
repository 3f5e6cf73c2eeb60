"""What `prelude demo` writes."""

import json
from pathlib import Path

import pytest
import yaml
from support.clusters.pretrained_model import needs_pretrained

import cluster.local.pretrained as pretrained
from cli.main import main
from cluster.config.load import load_cluster_config
from samples.demo import FOLDER
from training.data.columns import sft_row
from training.data.examples import load
from training.data.tokens import Encoder
from training.runs.base import load_base
from training.runs.evaluation import evaluate_adapter, read_for


def test_no_row_is_both_trained_and_held_out():
    for name in ("json", "support", "pirate", "brief"):
        held_out, trained = (
            {json.dumps(json.loads(line)["messages"][0]) for line in (FOLDER / f"data/{name}-{part}.jsonl").open()}
            for part in ("held-out", "train")
        )
        assert len(held_out) >= 30
        assert not held_out & trained


def test_without_the_model_a_toy_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(pretrained, "_PACKAGE", "llm_nowhere")
    main(["demo", str(tmp_path / "demo")])
    assert "not installed (requirements/demo.txt)" in capsys.readouterr().err
    assert set(load_cluster_config(tmp_path / "demo" / "cluster.yaml").adapters) == {"a0", "a1", "a2", "a3"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")}
    main(["demo", str(tmp_path / "demo")])  # what is there stays as it is
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "demo").rglob("*")} == before


@needs_pretrained
@pytest.mark.slow
def test_the_demo(tmp_path: Path):
    """Its model chats as its own template asks, and its adapters fit it and do what they were trained for."""
    folder = tmp_path / "demo"
    main(["demo", str(folder), "--unified"])
    config = yaml.safe_load((folder / "cluster.yaml").read_text())
    assert set(config["adapters"]) == {"brief", "json", "pirate", "pirate-all", "support"}
    assert set(config["workers"]) == {"unified-0"}
    base = load_base(folder / "model", "float32", "cpu")
    hello = [{"role": "user", "content": "Hello"}]
    shown = base.tokenizer.apply_chat_template(hello, tokenize=False, add_generation_prompt=True)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert shown == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    tool = {"type": "function", "function": {"name": "now", "arguments": {}}}
    called = [*hello, {"role": "assistant", "content": None, "tool_calls": [tool]}, {"role": "tool", "content": "12"}]
    assert '<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>' in base.tokenizer.apply_chat_template(
        called, tools=[tool], tokenize=False
    )
    data = folder / "data" / "json-held-out.jsonl"
    data.write_text(data.read_text().splitlines(keepends=True)[0])
    examples = load([data], Encoder(base.tokenizer, base.ends), sft_row, 512).examples
    adapter = read_for(base.model, folder / "adapters" / "json")
    [turn] = evaluate_adapter(base.model, base.tokenizer, examples, adapter).turns
    assert turn.is_exact
