"""Models of benchmarks: no weight is written where no engine reads one."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from adapters.model.base_model import BaseModel
from bench.matrix import systems as matrix_systems
from bench.matrix.options import Options
from bench.systems.models import MODELS, write_model
from cluster.local.demo import make_tokenizer

DUMMY = ("--load-format", "dummy")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [DUMMY, ("--load-format=dummy",), ("--a", "b", *DUMMY, "--c")])
def test_with_dummy_weights_there_is_no_weight_file(name: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    write_model(name, tmp_path, "cpu", arguments)
    assert not [each.name for each in tmp_path.iterdir() if "safetensors" in each.name or each.suffix == ".bin"]
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {each.name for each in tmp_path.iterdir()}
    base = BaseModel.read(tmp_path)
    assert (base.hidden, base.num_layers) == (MODELS[name].hidden, MODELS[name].num_layers)


def test_every_token_of_a_published_vocabulary_has_a_text(tmp_path: Path) -> None:
    """A chat's stream has no event for a token without one, so that its first tokens would seem to come late."""
    from transformers import AutoTokenizer

    write_model("llama-3.1-8b", tmp_path, "cpu", DUMMY)
    whole, known = AutoTokenizer.from_pretrained(tmp_path), make_tokenizer()
    size = BaseModel.read(tmp_path).vocabulary
    assert len(whole) == size
    new = range(len(known), size)
    texts = {whole.decode([token]) for token in new}
    assert len(texts) == len(new)
    assert "" not in texts
    text = "Some text, with #700 and 12 € more."
    assert whole.encode(text) == known.encode(text)
    chat = [{"role": "user", "content": text}]
    assert whole.apply_chat_template(chat, tokenize=False) == known.apply_chat_template(chat, tokenize=False)


@pytest.mark.parametrize("arguments", [(), ("--load-format", "auto"), ("--served-model-name", "dummy")])
def test_other_arguments_leave_the_weights(arguments: tuple[str, ...], tmp_path: Path) -> None:
    write_model("tiny", tmp_path, "cpu", arguments)
    assert (tmp_path / "model.safetensors").exists()


class Stopped(Exception):
    """After the model, nothing else is created."""


def test_a_matrix_hands_its_engine_arguments_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def write(name: str, folder: Path, device: str, engine_arguments: tuple[str, ...]) -> None:
        seen.append(engine_arguments)
        raise Stopped

    monkeypatch.setattr(matrix_systems, "write_model", write)
    options = Options((), ("none",), {}, 1.0, engine_arguments=DUMMY)
    with pytest.raises(Stopped):
        asyncio.run(matrix_systems.Starter(options, tmp_path, contextlib.AsyncExitStack()).start_all(print))
    assert seen == [DUMMY]
