"""A base model whose files are damaged or incomplete is refused, rather than filled up with random numbers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.held_calls import failing
from transformers import PreTrainedModel

from training.errors import MemoryExceeded, OptionInvalid
from training.runs.base import load_base

WEIGHTS = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture
def copied(setting, tmp_path: Path) -> Path:
    return shutil.copytree(setting.model, tmp_path / "model")


def change(directory: Path, changed: Change) -> None:
    weights = load_file(directory / WEIGHTS)
    changed(weights)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda weights: weights.pop(QUERY), rf"config.json: {QUERY} is missing\. Copy or download"),
        (lambda weights: weights.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda weights: [weights.pop(name) for name in list(weights)[1:6]], r"is missing; and 2 more\."),
        (
            lambda weights: weights.update({QUERY: torch.zeros(7, 5)}),
            rf"{QUERY} is \[7, 5\] and config.json wants \[32, 32\]",
        ),
    ],
    ids=["one", "the head", "several", "of another size"],
)
def test_weights_that_the_files_lack_are_not_made_up(copied: Path, changed: Change, message: str):
    """Each run, and each resumed one, would have others."""
    change(copied, changed)
    with pytest.raises(OptionInvalid, match=message):
        load_base(copied, "float32", "cpu")


@pytest.mark.parametrize(
    "content",
    [
        lambda whole: whole[:-100],  # of a download that broke off
        lambda whole: b"",
        lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
    ],
    ids=["cut off", "empty", "a pointer of Git LFS"],
)
def test_a_damaged_weight_file_is_told(copied: Path, content: Callable[[bytes], bytes]):
    path = copied / WEIGHTS
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(OptionInvalid, match=f"{copied}: a weight file is damaged or cut off"):
        load_base(copied, "float32", "cpu")


def test_weights_that_the_model_has_no_use_for_are_left_alone(copied: Path):
    change(copied, lambda weights: weights.update({"rotary.inv_freq": torch.zeros(3)}))
    assert load_base(copied, "float32", "cpu").sizes.num_layers == 2


def test_tied_embeddings_need_no_head_of_their_own(copied: Path):
    config = copied / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    change(copied, lambda weights: weights.pop("lm_head.weight"))
    model = load_base(copied, "float32", "cpu").model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_model_that_does_not_fit_is_told(setting, monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, PreTrainedModel, "to", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it."))
    with pytest.raises(MemoryExceeded, match=r"does not fit into the memory of 'cpu' as float32 \(CUDA out of memory"):
        load_base(setting.model, "float32", "cpu")
