"""The digest by which workers know that they have the same base model."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapters.errors import BaseModelInvalid
from adapters.model.base_weights import are_known_to_differ, weights_digest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 500, "rope_theta": 10000.0, "transformers_version": "5.12.1",
}  # fmt: skip
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = np.random.default_rng(3)
    for number, name in enumerate(FILES):
        layers = range(2 * number, 2 * number + 2)
        tensors = {
            f"model.layers.{layer}.self_attn.{part}_proj.weight": generator.normal(size=(64, 64)).astype(np.float32)
            for layer in layers
            for part in "qkvo"
        }
        save_file(tensors, folder / name)
    return folder


def retrained(part: str) -> Callable[[Path], None]:
    """One projection of every layer has other numbers, of the same sizes."""

    def change(folder: Path) -> None:
        for name in FILES:
            tensors = load_file(folder / name)
            for key in tensors:
                if f".{part}_proj." in key:
                    tensors[key] = tensors[key] * np.float32(1.001)
            save_file(tensors, folder / name)

    return change


def configured(**fields) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))


@pytest.mark.parametrize(
    "change",
    [
        *(retrained(part) for part in "qkvo"),
        configured(rope_theta=500000.0),
        lambda folder: (folder / FILES[1]).unlink(),
        lambda folder: (folder / FILES[1]).rename(folder / "model.safetensors"),
        lambda folder: shutil.copy(folder / FILES[0], folder / FILES[1]),
    ],
    ids=["q", "k", "v", "o", "rope_theta", "one file less", "another name", "another file"],
)
def test_other_weights_have_another_digest(model: Path, change):
    before = weights_digest(model)
    change(model)
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    "change",
    [
        configured(transformers_version="6.0.0", _name_or_path="/elsewhere"),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "training_args.bin").write_bytes(b"of a training run, which SGLang does not read"),
    ],
    ids=["who wrote it", "a tokenizer", "training arguments"],
)
def test_what_no_weight_depends_on_changes_nothing(model: Path, change):
    before = weights_digest(model)
    change(model)
    assert weights_digest(model) == before


def test_copies_and_links_have_the_same_digest(model: Path, tmp_path: Path):
    shutil.copytree(model, tmp_path / "copy")
    (tmp_path / "linked").mkdir()
    for path in model.iterdir():  # as in a Hugging Face cache
        (tmp_path / "linked" / path.name).symlink_to(path)
    assert weights_digest(tmp_path / "copy") == weights_digest(tmp_path / "linked") == weights_digest(model)


def test_digests_of_one_edition_are_compared(model: Path):
    digest = weights_digest(model)
    assert re.fullmatch("1:[0-9a-f]{32}", digest)
    assert are_known_to_differ(digest, weights_digest(model, '{"rope_theta": 1}'))
    assert not any(are_known_to_differ(digest, theirs) for theirs in (digest, "", digest.replace("1:", "2:")))


def test_another_way_to_compute_it_needs_another_edition(tmp_path: Path):
    """Workers of two releases that compute it differently would refuse each other."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    assert weights_digest(tmp_path) == "1:3ce554ed4b7ff024e8298f9fa68c9c2d"


def test_a_directory_without_weights_and_files_of_other_kinds(model: Path):
    for name in FILES:
        (model / name).unlink()
    without = weights_digest(model)
    (model / "pytorch_model.bin").write_bytes(b"")  # shorter than a sample
    assert weights_digest(model) != without


def test_a_large_model_takes_no_longer(model: Path):
    """It reads as little. No bound on seconds: beside other work a thousand small reads can take some."""
    for name in FILES:
        with (model / name).open("r+b") as file:
            file.truncate(1 << 40)
    before = _bytes_read()
    weights_digest(model)
    assert _bytes_read() - before < 1 << 20  # of two files of a TiB


def _bytes_read() -> int:
    """By this process, so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_what_cannot_be_read_is_named(model: Path):
    (model / FILES[0]).unlink()
    (model / FILES[0]).symlink_to("gone")
    with pytest.raises(BaseModelInvalid, match=re.escape(FILES[0])):
        weights_digest(model)
    (model / "config.json").write_text("[]")
    with pytest.raises(BaseModelInvalid, match="not a JSON object"):
        weights_digest(model)
