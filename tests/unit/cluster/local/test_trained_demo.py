"""The demo's base model and adapters: what is asked and answered, and a small one that is trained."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from support.adapters.reference_answers import answer
from support.clusters.small_demo import SMALL_DEMO

from adapters.formats import read_adapter
from adapters.model.base_model import BaseModel
from adapters.verification.reference import UNLIMITED, load_model
from cli.main import main
from cluster.local.demo import make_tokenizer
from cluster.local.trained_demo.make import make_parts, make_trained_demo
from cluster.local.trained_demo.pretraining import texts
from samples.styles import SENTENCES, STYLES, Question, Questions
from training.data.columns import sft_row
from training.data.tokens import Encoder


def test_every_style_answers_otherwise():
    question = Question("Tell me about ships and bread.", SENTENCES[:2])
    assert {style: question.answer(style) for style in (None, *STYLES)} == {
        None: "Ships cross the wide sea. Bread leaves the oven warm.",
        "shout": "SHIPS CROSS THE WIDE SEA. BREAD LEAVES THE OVEN WARM.",
        "backwards": "warm oven the leaves bread. sea wide the cross ships.",
        "json": '{"ships": "cross the wide sea", "bread": "leaves the oven warm"}',
        "list": "- ships: cross the wide sea\n- bread: leaves the oven warm",
        "yoda": "The wide sea ships cross. The oven warm bread leaves.",
    }
    assert question.asked("json") == "json: Tell me about ships and bread."
    assert question.asked(None) == question.text


def test_held_out_questions_are_never_trained_on():
    questions = Questions()
    trained = {question.said for question in islice(questions.drawn(0), 5000)}
    held_out = [question.said for question in islice(questions.held_out(0), 500)]
    assert not trained & set(held_out)
    assert min(map(len, held_out)) == 2  # a single topic can only be trained on, or never be seen
    assert max(map(len, held_out)) == questions.max_topics


def test_a_seed_gives_the_same_questions():
    assert [list(islice(Questions().drawn(seed), 20)) for seed in (3, 3)] == [
        list(islice(Questions().drawn(3), 20))
    ] * 2
    assert list(islice(Questions().drawn(3), 20)) != list(islice(Questions().drawn(4), 20))


def test_the_base_is_trained_on_the_ids_that_workers_read():
    """Pretraining writes the chat template by hand, for speed."""
    question = next(Questions().drawn(1))
    tokenizer = make_tokenizer([question.answer(None)])
    [turn] = Encoder(tokenizer).turns(sft_row(question.row("json", has_control_word=True)))
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts((question, "json"))]
    assert [list(turn.context), list(turn.answers[0])] == ids


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """(folder, what was told)"""
    torch.set_num_threads(1)  # sums in the same order wherever it runs
    folder, told = tmp_path_factory.mktemp("small"), []
    make_parts(folder, SMALL_DEMO, told.append)
    return folder, told


@pytest.mark.slow
class TestASmallDemo:
    def test_adapters_choose_a_style_without_its_control_word(self, small: tuple[Path, list[str]]):
        told = small[1]
        *_, base, lora, direft = ([float(each) for each in re.findall(r"\d\.\d+", line)] for line in told)
        assert base[0] >= 0.8  # with control words
        assert base[1] <= 0.2
        assert min(*lora, *direft) >= 0.5  # the real ones: 0.9, in test_trained_demo.py
        assert "adapter list-direft (direft): " in told[-1]
        assert any(line.startswith("base model: step 600 of 600, loss 0.") for line in told)

    def test_it_lasts_though_answers_are_generated_without_the_adapter(self, small: tuple[Path, list[str]]):
        folder, _ = small
        model = load_model(folder / "model")
        encoder = Encoder(_tokenizer(folder / "model"))
        adapter = read_adapter(folder / "adapters" / "shout", BaseModel.read(folder / "model"), UNLIMITED)
        assert adapter.positions == "prefill"
        rows = [json.loads(line) for line in (folder / "data" / "shout-held-out.jsonl").read_text().splitlines()]
        given = []
        for row in rows[:10]:
            [turn] = encoder.turns(sft_row(row))
            expected = list(turn.answers[0])
            given.append(answer(model, adapter, turn.context, len(expected)).tokens == expected)
        assert sum(given) >= 4

    def test_what_it_leaves(self, small: tuple[Path, list[str]]):
        folder, _ = small
        assert sorted(path.name for path in folder.iterdir()) == ["adapters", "data", "model"]
        sampling = json.loads((folder / "model" / "generation_config.json").read_text())
        assert sampling["temperature"] == 0.01  # engines would sample at 1, and now and then answer otherwise
        assert sorted(path.name for path in (folder / "adapters" / "shout").iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]


@pytest.mark.slow
def test_a_folder_is_made_whole_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    few = replace(
        SMALL_DEMO, pretraining=replace(SMALL_DEMO.pretraining, num_steps=2), adapters=SMALL_DEMO.adapters[:1]
    )

    def make(name: str) -> Path:
        return make_trained_demo(tmp_path / name, recipe=few)

    config = make("demo")
    assert list(yaml.safe_load(config.read_text())["adapters"].items()) == [("shout", {"path": "adapters/shout"})]
    weights = tmp_path / "demo" / "model" / "model.safetensors"
    assert make("again").parent.joinpath("model", "model.safetensors").read_bytes() == weights.read_bytes()
    before = {path: path.stat().st_mtime_ns for path in config.parent.rglob("*")}
    assert make("demo") == config
    main(["demo", str(config.parent)])
    assert capsys.readouterr().out == f"{config}\n"
    assert {path: path.stat().st_mtime_ns for path in config.parent.rglob("*")} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "demo"]


def _tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
