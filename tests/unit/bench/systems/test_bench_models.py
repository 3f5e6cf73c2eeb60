"""Models of benchmarks: no weight is written where no engine reads one."""

from pathlib import Path

import pytest

from adapters.model.base_model import BaseModel
from bench.systems.models import MODELS, write_model
from cluster.local.demo import make_tokenizer

DUMMY = ("--load-format", "dummy")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [*((name, DUMMY) for name in MODELS), ("tiny", ("--load-format=dummy",)), ("tiny", ("--a", "b", *DUMMY, "--c"))],
)
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
