"""What an adapter's directory says of its base model and of what it was converted from: mostly warnings."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.adapters.damaged_adapters import edit_config
from support.adapters.random_adapters import write_random_lora, write_random_reft
from support.adapters.tiny_model import write_model_config

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of

WORDS = {"<eos>": 0, "a": 1, "b": 2}
TOKENIZER = {"model": {"type": "BPE", "vocab": WORDS}, "added_tokens": [{"id": 3, "content": "<tool>"}]}
SETTINGS = {
    "eos_token": "<eos>",
    "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"3": {"content": "<tool>"}},
}


def put(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.fixture
def base(tmp_path: Path) -> BaseModel:
    directory = write_model_config(tmp_path / "tiny-llama")
    return BaseModel.read(put(directory, tokenizer__json=TOKENIZER, tokenizer_config__json=SETTINGS))


@pytest.fixture
def lora(base: BaseModel, tmp_path: Path) -> Path:
    return write_random_lora(tmp_path / "lora", base, 1)


def warnings(directory: Path, base: BaseModel) -> tuple[str, ...]:
    return read_adapter(directory, base, Limits()).warnings


def test_the_base_models_own_files_are_no_matter(base: BaseModel, lora: Path) -> None:
    assert warnings(lora, base) == ()
    put(lora, tokenizer__json=TOKENIZER, tokenizer_config__json=SETTINGS, added_tokens__json={"<tool>": 3})
    put(lora, special_tokens_map__json={"eos_token": {"content": "<eos>"}})
    assert warnings(lora, base) == ()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer__json": {**TOKENIZER, "added_tokens": [{"id": 9, "content": "<new>"}]}}, "'<new>' with id 9"),
        ({"tokenizer__json": {"model": {"vocab": {**WORDS, "c": 4}}}}, "'c' with id 4, which .* does not have"),
        ({"tokenizer__json": {"model": {"vocab": {"a": 2}}}}, "'a' with id 2, which .* gives it id 1"),
        ({"tokenizer__json": {"model": {"vocab": [["<eos>", 0.0], ["z", -1.0]]}}}, "'z' with id 1"),
        ({"tokenizer_config__json": {"added_tokens_decoder": {"5": {"content": "<x>"}}}}, "'<x>' with id 5"),
        ({"added_tokens__json": {"<y>": 6}}, "'<y>' with id 6"),
    ],
)
def test_tokens_that_the_base_model_lacks_are_refused(base: BaseModel, lora: Path, files: Any, says: str) -> None:
    with pytest.raises(AdapterUnsupported, match=says):
        read_adapter(put(lora, **files), base, Limits())


def test_without_a_tokenizer_of_the_base_model_its_size_counts(tmp_path: Path) -> None:
    base = BaseModel.read(write_model_config(tmp_path / "sizes"))
    lora = write_random_lora(tmp_path / "lora", base, 1)
    read_adapter(put(lora, added_tokens__json={"<x>": base.vocabulary - 1}), base, Limits())
    with pytest.raises(AdapterUnsupported, match=f"its vocabulary has {base.vocabulary}"):
        read_adapter(put(lora, added_tokens__json={"<x>": base.vocabulary}), base, Limits())


def test_a_broken_tokenizer(base: BaseModel, lora: Path) -> None:
    assert warnings(put(lora, tokenizer__json="{"), base) == (
        "tokenizer.json is not valid JSON, so it was not compared with the base model's",
    )
    with pytest.raises(AdapterMalformed, match=r"tokenizer\.json: the id of token 'a' is 'one'"):
        read_adapter(put(lora, tokenizer__json={"model": {"vocab": {"a": "one"}}}), base, Limits())


@pytest.mark.parametrize("file", ["tokenizer_config__json", "chat_template__jinja", "several"])
def test_another_chat_template_is_a_warning(base: BaseModel, lora: Path, file: str) -> None:
    template = "{% for message in messages %}"
    several = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]}
    if file == "several":
        put(lora, tokenizer_config__json=several)
    else:
        put(lora, **{file: template if "jinja" in file else {"chat_template": template}})
    [warning] = warnings(lora, base)
    assert "its chat template differs" in warning


def test_another_end_token_is_a_warning(base: BaseModel, lora: Path) -> None:
    [warning] = warnings(put(lora, special_tokens_map__json={"eos_token": {"content": "<tool>"}}), base)
    assert "'<tool>'" in warning
    assert "'<eos>'" in warning


def test_fields_of_peft_that_are_not_known(base: BaseModel, lora: Path) -> None:
    edit_config(use_spectral_gate=True, another=None, third=[], lora_dropout=0.1, task_type="CAUSAL_LM")(lora)
    [warning] = warnings(lora, base)
    assert "use_spectral_gate is True" in warning


@pytest.mark.parametrize(
    ("named", "warns"),
    [("org/Tiny-Llama", False), ("/models/tiny_llama/", False), ("", False), ("meta-llama/Llama-3.1-8B", True)],
)
def test_the_name_of_another_base_model(base: BaseModel, lora: Path, named: str, warns: bool) -> None:
    edit_config(base_model_name_or_path=named)(lora)
    assert [named in each for each in warnings(lora, base)] == [True] * warns


def test_warnings_change_no_revision(base: BaseModel, lora: Path) -> None:
    before = revision_id_of(read_adapter(lora, base, Limits()))
    put(lora, chat_template__jinja="other")
    assert revision_id_of(read_adapter(lora, base, Limits())) == before


def test_other_formats_are_compared_too(base: BaseModel, tmp_path: Path) -> None:
    reft = put(write_random_reft(tmp_path / "reft", base, 1), chat_template__jinja="other")
    assert len(warnings(reft, base)) == 1


SAID = {"from": f"sha256:{'a1' * 32}", "data": "b2" * 32, "agreement": 0.97}


def converted_lora(folder: Path, base: BaseModel, converted: Any) -> Path:
    said = {"positions": "prefill", "converted": converted}
    return write_random_lora(folder / "lora", base, 1, rank=2, config={"prelude": said})


def test_what_it_was_converted_from_is_kept_and_changes_no_revision(base: BaseModel, tmp_path: Path) -> None:
    converted, plain = (
        read_adapter(converted_lora(tmp_path / str(n), base, each), base, Limits())
        for n, each in enumerate((SAID, None))
    )
    assert converted.warnings == (
        f"converted from sha256:{'a1' * 32} for the prompt only, agreement 0.970, data sha256:{'b2' * 32}",
    )
    assert plain.warnings == ()
    assert revision_id_of(converted) == revision_id_of(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"from": "sha256:\x1b[31m"}, "from is .* a revision id"),
        ({"from": None}, "from is null; it must be a revision id"),
        ({"data": "B2" * 32}, "data is .* 64 lower-case hex digits"),
        ({"agreement": 1.1}, "agreement is 1.1; it must be a number from 0 to 1"),
        ({"agreement": None}, "agreement is null"),
        ({"agreement": "much"}, "agreement is .much.; it must be a finite number"),
    ],
)
def test_strange_origins_are_refused(base: BaseModel, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterMalformed, match=message):
        read_adapter(converted_lora(tmp_path, base, SAID | change), base, Limits())
    with pytest.raises(AdapterMalformed, match=r"converted is .*; it must be an object"):
        read_adapter(converted_lora(tmp_path / "list", base, [SAID]), base, Limits())
