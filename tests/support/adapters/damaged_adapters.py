"""Ways to spoil a sound PEFT LoRA directory, each with the error that must come of it. For tests."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.adapters.random_adapters import write_random_lora

from adapters.errors import (
    AdapterError,
    AdapterIncompatible,
    AdapterMalformed,
    AdapterTooLarge,
    AdapterUnsupported,
)
from adapters.formats import Limits, read_adapter
from adapters.formats.safetensors_file import MAX_HEADER_BYTES
from adapters.model.base_model import BaseModel

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Header = dict[str, Any]
Spoiler = Callable[[Path], object]  # changes a directory; what it returns is of no interest


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to spoil an adapter. `says` is part of the message that the user must get."""

    apply: Spoiler
    error: type[AdapterError]
    says: str


def assert_named(damage: Damage, directory: Path, base: BaseModel, limits: Limits) -> None:
    """The directory can be read, and once it is spoiled the user gets the error that must come of it."""
    read_adapter(directory, base, limits)
    damage.apply(directory)
    with pytest.raises(AdapterError) as caught:
        read_adapter(directory, base, limits)
    assert type(caught.value) is damage.error
    assert damage.says in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert not caught.value.retryable
    assert 400 <= caught.value.http_status < 500


def edit_config(**fields: Any) -> Spoiler:
    """Sets fields of adapter_config.json; a field set to `...` is taken out."""

    def apply(directory: Path) -> None:
        path = directory / _CONFIG
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return apply


def write_config(text: str) -> Spoiler:
    """Replaces adapter_config.json by a text."""
    return lambda directory: (directory / _CONFIG).write_text(text)


def edit_header(edit: Callable[[Header], object]) -> Spoiler:
    """Changes the header of the weights, in place or by returning another; the tensors' bytes stay as they are."""

    def apply(directory: Path) -> None:
        header, body = read_raw(directory / _WEIGHTS)
        edited = edit(header)
        write_raw(directory / _WEIGHTS, edited if isinstance(edited, dict) else header, body)

    return apply


def rename_tensors(old: str, new: str) -> Spoiler:
    """Replaces a part of every tensor's name."""
    return edit_header(lambda header: {name.replace(old, new): entry for name, entry in header.items()})


def rename_first(contains: str, new: str) -> Spoiler:
    """Renames one tensor."""

    def edit(header: Header) -> Header:
        first = min(name for name in header if contains in name)
        return {new if name == first else name: entry for name, entry in header.items()}

    return edit_header(edit)


def read_raw(path: Path) -> tuple[Header, bytes]:
    """(header, tensors' bytes) of a sound safetensors file."""
    return parts_of(path.read_bytes())


def write_raw(path: Path, header: Header | bytes, body: bytes) -> None:
    """Writes a header as it is, sound or not."""
    path.write_bytes(joined(header, body))


def parts_of(data: bytes) -> tuple[Header, bytes]:
    """(header, tensors' bytes) of the bytes of such a file, which may be a packed one."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), data[begin:]


def joined(header: Header | bytes, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b"" if isinstance(header, bytes) else b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + tensors


def write_large_header(directory: Path, base: BaseModel) -> Path:
    """A directory whose weights are a header of nearly the largest size: 260,000 empty tensors."""
    write_random_lora(directory, base, 1)
    entry = '"layer {}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    num_tensors = (MAX_HEADER_BYTES - 1024) // (len(entry) + 4)
    text = ("{" + ",".join([entry.format(number) for number in range(num_tensors)]) + "}").encode()
    assert 15 * 1024**2 < len(text) <= MAX_HEADER_BYTES
    write_raw(directory / _WEIGHTS, text, b"")
    return directory


def _entry(header: Header) -> Any:
    return header[min(name for name in header if name != "__metadata__")]


def _set_first(**fields: Any) -> Spoiler:
    return edit_header(lambda header: _entry(header).update(fields))


def _replace_bytes(make: Callable[[bytes], bytes]) -> Spoiler:
    def apply(directory: Path) -> None:
        path = directory / _WEIGHTS
        path.write_bytes(make(path.read_bytes()))

    return apply


def _header_text(make: Callable[[bytes], bytes]) -> Spoiler:
    def apply(directory: Path) -> None:
        header, body = read_raw(directory / _WEIGHTS)
        write_raw(directory / _WEIGHTS, make(json.dumps(header).encode()), body)

    return apply


def _drop_tensors(contains: str) -> Spoiler:
    def apply(directory: Path) -> None:
        header, body = read_raw(directory / _WEIGHTS)
        kept, new_body = {}, b""
        for name, entry in header.items():
            if name == "__metadata__" or contains in name:
                continue
            begin, end = entry["data_offsets"]
            kept[name] = entry | {"data_offsets": [len(new_body), len(new_body) + end - begin]}
            new_body += body[begin:end]
        write_raw(directory / _WEIGHTS, kept, new_body)

    return apply


def _link(name: str) -> Spoiler:
    """Moves a file out of the directory and leaves a symbolic link to it."""

    def apply(directory: Path) -> None:
        target = directory.parent / f"{directory.name}-{name}"
        (directory / name).rename(target)
        (directory / name).symlink_to(target)

    return apply


def _pickle(directory: Path) -> None:
    (directory / _WEIGHTS).unlink()
    (directory / "adapter_model.bin").write_bytes(b"\x80\x04K\x00.")


def _shards(directory: Path) -> None:
    (directory / _WEIGHTS).rename(directory / "part.safetensors")
    (directory / f"{_WEIGHTS}.index.json").write_text("{}")


def _overlap(header: Header) -> None:
    first = _entry(header)
    for name, entry in header.items():
        if name != "__metadata__" and entry["shape"] == first["shape"]:
            entry["data_offsets"] = first["data_offsets"]


def _leave_hole(directory: Path) -> None:
    header, body = read_raw(directory / _WEIGHTS)
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    write_raw(directory / _WEIGHTS, header, bytes(8) + body)


_PREFIX = "base_model.model.model.layers.0.self_attn"
_M, _U, _I = AdapterMalformed, AdapterUnsupported, AdapterIncompatible

# For a LoRA that `random_adapters.write_random_lora` wrote in float32 with rank 8 or less, for a model of fewer than 99
# layers, q_proj and v_proj among its modules.
DAMAGES: dict[str, Damage] = {
    # The configuration
    "no configuration": Damage(lambda d: (d / _CONFIG).unlink(), _M, "is no adapter"),
    "configuration is a list": Damage(write_config("[1]"), _M, "must hold an object"),
    "configuration is no JSON": Damage(write_config("{'r': 8}"), _M, "not valid JSON"),
    "configuration is not UTF-8": Damage(lambda d: (d / _CONFIG).write_bytes(b'{"r": "\xff"}'), _M, "JSON"),
    "configuration is nested too deeply": Damage(write_config("[" * 200_000), _M, "not valid JSON"),
    "configuration repeats a key": Damage(write_config('{"r": 1, "r": 2}'), _M, "occurs twice"),
    "configuration has NaN": Damage(write_config('{"lora_alpha": NaN}'), _M, "not a JSON value"),
    "configuration has an overflowing number": Damage(write_config('{"lora_alpha": 1e999}'), _M, "too large"),
    "configuration is huge": Damage(write_config(" " * (1 << 21)), AdapterTooLarge, "at most"),
    "no peft_type": Damage(edit_config(peft_type=...), _M, "peft_type"),
    "unknown peft_type": Damage(edit_config(peft_type="IA3"), _U, "IA3"),
    "rank 0": Damage(edit_config(r=0), _M, "r is 0"),
    "rank is a boolean": Damage(edit_config(r=True), _M, "r is true"),
    "rank is enormous": Damage(edit_config(r=10**40), _M, "r is 1"),
    "another rank than the tensors'": Damage(edit_config(r=9), _M, "says 9"),
    "alpha is a list": Damage(edit_config(lora_alpha=[1]), _M, "lora_alpha"),
    "alpha is out of float32": Damage(edit_config(lora_alpha=1e300), _M, "scale"),
    "rank_pattern has a float": Damage(edit_config(rank_pattern={"q_proj": 8.5}), _M, "rank_pattern"),
    "alpha_pattern has a string": Damage(edit_config(alpha_pattern={"q_proj": "8"}), _M, "alpha_pattern"),
    "alpha_pattern is no name": Damage(edit_config(alpha_pattern={".*_proj": 8}), _U, "name each module"),
    "use_rslora is a string": Damage(edit_config(use_rslora="yes"), _M, "use_rslora"),
    "DoRA": Damage(edit_config(use_dora=True), _U, "DoRA"),
    "bias": Damage(edit_config(bias="all"), _U, "bias is 'all'"),
    "LoRA bias": Damage(edit_config(lora_bias=True), _U, "lora_bias"),
    "modules_to_save": Damage(edit_config(modules_to_save=["lm_head"]), _U, "modules_to_save"),
    "trained tokens": Damage(edit_config(trainable_token_indices=[5]), _U, "trainable_token_indices"),
    "target_parameters": Damage(edit_config(target_parameters=["mlp.w"]), _U, "target_parameters"),
    "layer replication": Damage(edit_config(layer_replication=[[0, 1]]), _U, "layer_replication"),
    "activated LoRA": Damage(edit_config(alora_invocation_tokens=[1]), _U, "activated LoRA"),
    "PiSSA": Damage(edit_config(init_lora_weights="pissa"), _U, "path_initial_model_for_weight_conversion"),
    "no target_modules": Damage(edit_config(target_modules=...), _M, "target_modules"),
    "target_modules has a number": Damage(edit_config(target_modules=["q_proj", 7]), _M, "target_modules"),
    "target_modules lacks a tensor's module": Damage(edit_config(target_modules=["v_proj"]), _M, "does not name it"),
    "target_modules names the embedding": Damage(
        edit_config(target_modules=["q_proj", "v_proj", "embed_tokens"]), _U, "embed_tokens"
    ),
    "layers_to_transform is a string": Damage(edit_config(layers_to_transform="0"), _M, "layers_to_transform"),
    "layers_to_transform is beyond the model": Damage(edit_config(layers_to_transform=[0, 1, 2, 99]), _I, "layer 99"),
    "layers_to_transform lacks a tensor's layer": Damage(edit_config(layers_to_transform=[0]), _M, "does not name it"),
    "positions unknown": Damage(edit_config(prelude={"positions": "decode"}), _M, "positions"),
    "added tokens": Damage(
        lambda d: (d / "added_tokens.json").write_text('{"<new>": 10000000}'), _U, "cannot add tokens"
    ),
    # The tensors' names
    "unknown tensor": Damage(rename_first("lora_A", "surprise"), _M, "'surprise' is not known"),
    "tensor of an unknown module": Damage(
        rename_first("q_proj.lora_A", f"{_PREFIX}.w_pack.lora_A.weight"), _I, "w_pack"
    ),
    "tensor of an unknown layer": Damage(rename_tensors("layers.0.", "layers.99."), _I, "layer 99"),
    "module in the wrong block": Damage(rename_tensors("self_attn.q_proj", "mlp.q_proj"), _M, "is not in mlp"),
    "tensor named twice": Damage(
        rename_first("0.self_attn.v_proj.lora_A", "model.layers.0.self_attn.q_proj.lora_A.weight"),
        _M,
        "the same tensor",
    ),
    "two adapters in one file": Damage(
        rename_first("0.self_attn.q_proj.lora_A", f"{_PREFIX}.q_proj.lora_A.other.weight"), _M, "several adapters"
    ),
    "DoRA's magnitude": Damage(rename_first("q_proj.lora_A", f"{_PREFIX}.q_proj.lora_magnitude_vector"), _U, "DoRA"),
    "embedding tensor": Damage(
        rename_first("lora_A", "base_model.model.model.embed_tokens.lora_embedding_A"), _U, "embed"
    ),
    "the base model's head": Damage(
        rename_first("lora_A", "base_model.model.lm_head.weight"), _U, "save_embedding_layers=False"
    ),
    "LoRA on the output head": Damage(
        rename_first("lora_A", "base_model.model.lm_head.lora_A.weight"), _U, "train_unembed=False"
    ),
    "a value head": Damage(rename_first("lora_A", "v_head.summary.bias"), _U, "value head"),
    "bias tensor": Damage(rename_first("q_proj.lora_B", f"{_PREFIX}.q_proj.bias"), _U, "biases"),
    "A without B": Damage(_drop_tensors("0.self_attn.q_proj.lora_B"), _M, "has no lora_B"),
    "named module without tensors": Damage(_drop_tensors("v_proj"), _M, "no tensors for it"),
    "no tensors": Damage(_drop_tensors("lora"), _M, "has no tensors"),
    # The tensors' values and shapes
    "NaN": Damage(_replace_bytes(lambda data: data[:-4] + b"\x00\x00\xc0\x7f"), _M, "must be finite"),
    "integers": Damage(_set_first(dtype="I32"), _U, "I32"),
    "one dimension": Damage(
        edit_header(lambda h: _entry(h).update(shape=[_entry(h)["shape"][0] * _entry(h)["shape"][1]])),
        _M,
        "two dimensions",
    ),
    "turned round": Damage(edit_header(lambda h: _entry(h).update(shape=_entry(h)["shape"][::-1])), _M, "rank"),
    # The file
    "no weights": Damage(lambda d: (d / _WEIGHTS).unlink(), _M, "weights are missing"),
    "pickle": Damage(_pickle, _U, "save_pretrained"),
    "empty file": Damage(_replace_bytes(lambda data: b""), _M, "too few"),
    "cut short": Damage(_replace_bytes(lambda data: data[:-1]), _M, "bytes"),
    "bytes behind the tensors": Damage(_replace_bytes(lambda data: data + b"\0"), _M, "end at byte"),
    "header length is enormous": Damage(_replace_bytes(lambda data: b"\xff" * 8 + data[8:]), _M, "too few"),
    "header is huge": Damage(_header_text(lambda text: text + b" " * (17 << 20)), _M, "claims"),
    "header is no JSON": Damage(_header_text(lambda text: b"{" + text), _M, "JSON"),
    "header is a list": Damage(_header_text(lambda text: b"[]"), _M, "not a JSON object"),
    "header is nested too deeply": Damage(_header_text(lambda text: b'{"a":' * 200_000), _M, "JSON"),
    "header repeats a tensor": Damage(
        _header_text(lambda text: text[:-1] + b"," + text[text.index(b'"base') : -1] + b"}"), _M, "occurs twice"
    ),
    "metadata is no object": Damage(edit_header(lambda h: h | {"__metadata__": 3}), _M, "__metadata__"),
    "entry has another field": Damage(_set_first(more=1), _M, "exactly dtype"),
    "unknown dtype": Damage(_set_first(dtype="F99"), _M, "unknown dtype"),
    "shape has a negative size": Damage(_set_first(shape=[-1, -8]), _M, "shape"),
    "shape overflows": Damage(_set_first(shape=[1 << 40, 1 << 40]), _M, "cannot have"),
    "shape promises terabytes": Damage(
        edit_header(lambda h: _entry(h).update(shape=[1 << 20, 1 << 20], data_offsets=[0, 1 << 42])), _M, "ends at byte"
    ),
    "offsets overlap": Damage(edit_header(_overlap), _M, "overlap"),
    "offsets leave a hole": Damage(_leave_hole, _M, "hole"),
    # The directory
    "symbolic link to the weights": Damage(_link(_WEIGHTS), _U, "symbolic link"),
    "shards": Damage(_shards, _U, "several files"),
}


def _rename_expert(pattern: str, new: str) -> Spoiler:
    """Replaces a part of the name of one tensor of an expert."""

    def edit(header: Header) -> Header:
        first = min(name for name in header if ".experts." in name)
        return {re.sub(pattern, new, name, count=1) if name == first else name: header[name] for name in header}

    return edit_header(edit)


# For a LoRA of all experts and q_proj that `random_adapters.write_random_expert_lora` wrote in float32, for a model of
# fewer than 99 experts and layers, layer 1 of it without experts.
EXPERT_DAMAGES: dict[str, Damage] = {
    "an expert too many": Damage(_rename_expert(r"experts\.\d+", "experts.99"), _I, "for expert 99"),
    "an expert with a leading zero": Damage(_rename_expert(r"experts\.\d+", "experts.01"), _M, "is not known"),
    "a layer too many": Damage(_rename_expert(r"layers\.\d+", "layers.99"), _I, "for layer 99"),
    "a layer without": Damage(_rename_expert(r"layers\.\d+", "layers.1"), _I, "layer 1 of the base model"),
    "a projection that experts do not have": Damage(
        _rename_expert(r"experts\.(\d+)\.\w+", r"experts.\1.q_proj"), _I, "whose experts are named"
    ),
    "another architecture's block": Damage(
        _rename_expert(r"(mlp|block_sparse_moe)\.experts", "feed_forward.experts"), _M, "is not known"
    ),
    "an MLP where there are experts": Damage(
        _rename_expert(r"(mlp|block_sparse_moe)\.experts\.\d+\.\w+", "mlp.up_proj"), _I, "has experts in its place"
    ),
    "the router": Damage(
        _rename_expert(r"(mlp|block_sparse_moe)\.experts\.\d+\.\w+", r"\1.gate"), _U, "LoRA on a router changes"
    ),
    "the router is named": Damage(edit_config(target_modules=["q_proj", "gate"]), _U, "LoRA on a router changes"),
    "no tensors of any expert": Damage(_drop_tensors(".experts."), _M, "there are no tensors for it"),
    "experts that are not named": Damage(edit_config(target_modules=["q_proj"]), _M, "does not name it"),
    "another rank": Damage(edit_config(r=5), _M, "says 5"),
    "a wrapper that is not named": Damage(
        _rename_expert(r"(mlp|block_sparse_moe)\.experts\.\d+\.\w+", "mlp.experts"), _M, "has no lora_"
    ),
    "a weight of the base model": Damage(_rename_expert(r"lora_A", "base_layer"), _U, "weight of the base model"),
}
