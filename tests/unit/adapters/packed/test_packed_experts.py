"""LoRA on experts, packed: every value where an engine's slot has it, at the scale of real mixtures too."""

import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from support.adapters.damaged_adapters import joined, parts_of
from support.adapters.random_adapters import write_random_expert_lora
from support.adapters.tiny_model import TINY_QWEN3_MOE, write_model_config

from adapters.errors import AdapterIncompatible, AdapterMalformed
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel, Experts
from adapters.model.number_ranges import count_of
from adapters.packed import read_packed, write_packed
from adapters.packed.metadata import MAX_HEADER_BYTES
from adapters.verification.reference import UNLIMITED

DTYPES = ["float32", "bfloat16", "float16"]


def test_values_that_do_not_fit_are_named_and_nothing_is_left(tmp_path):
    base = BaseModel.read(write_model_config(tmp_path / "model", **TINY_QWEN3_MOE))
    source = write_random_expert_lora(tmp_path / "lora", base, 1, alpha=8e6)
    with pytest.raises(AdapterIncompatible, match=r"layer 0 expert 0 down_proj: the scaled B has .* large for float16"):
        write_packed(read_adapter(source, base, UNLIMITED), base, "float16", tmp_path / "packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lora", "model"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    base = BaseModel.read(write_model_config(folder / "model", **TINY_QWEN3_MOE))
    source = write_random_expert_lora(folder / "lora", base, 1, attention=["q_proj"], experts=[0, 1, 3])
    write_packed(read_adapter(source, base, UNLIMITED), base, "bfloat16", folder / "packed")
    return base, (folder / "packed").read_bytes()


def changed(**values):
    return lambda experts: experts | values


def changed_module(**values):
    return lambda experts: (
        experts | {"modules": experts["modules"] | {"down_proj_moe": experts["modules"]["down_proj_moe"] | values}}
    )


LIES = {
    "not said": (lambda experts: None, "should not have the tensors"),
    "a rank one larger": (changed(rank=5), "LoRA's rank of 4 is below experts's of 5"),
    "a rank one smaller": (changed(rank=3), "tensor 'lora.down_proj_moe.a'"),
    "no modules": (changed(modules={}), "modules is"),
    "a dense module": (changed(modules={"down_proj": {}}), "modules is"),
    "a module left out": (lambda e: e | {"modules": {"down_proj_moe": e["modules"]["down_proj_moe"]}}, "should not"),
    "an expert more": (changed_module(experts=[[[0, 1], [3, 3]], [[0, 1], [3, 4]]]), "tensor 'lora.down_proj_moe.a'"),
    "experts of one layer": (changed_module(experts=[[[0, 1], [3, 3]]]), "experts is"),
    "experts that overlap": (changed_module(experts=[[[0, 1], [1, 2]], [[0, 2]]]), "experts is"),
    "experts that touch": (changed_module(experts=[[[0, 1], [2, 2]], [[0, 2]]]), "experts is"),
    "experts that descend": (changed_module(experts=[[[3, 3], [0, 1]], [[0, 2]]]), "experts is"),
    "a range turned round": (changed_module(experts=[[[2, 0]], [[0, 2]]]), "experts is"),
    "a negative expert": (changed_module(experts=[[[-1, 1]], [[0, 2]]]), "experts is"),
    "a huge expert": (changed_module(experts=[[[0, 1 << 40]], [[0, 2]]]), "experts is"),
    "a layer without any": (changed_module(experts=[[], [[0, 5]]]), "experts is"),
    "a flat list": (changed_module(experts=[0, 1]), "experts is"),
    "a number in place of a range": (changed_module(experts=[[0], [1]]), "experts is"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_about_experts_are_refused(name, sound, tmp_path):
    change, message = LIES[name]
    header, tensors = parts_of(sound[1])
    metadata = header["__metadata__"]
    experts = change(json.loads(metadata.pop("experts")))
    header["__metadata__"] = metadata | ({"experts": json.dumps(experts)} if experts else {})
    (tmp_path / "packed").write_bytes(joined(header, tensors))
    with pytest.raises(AdapterMalformed) as caught:
        read_packed(tmp_path / "packed")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"experts": None}, "has gate_up_proj_moe, down_proj_moe"),
        ({"experts": Experts(3, 20, (0, 2))}, "has expert 3, "),
        ({"experts": Experts(5, 20, (0,))}, "experts in layer 2"),
        ({"experts": Experts(5, 21, (0, 2))}, "down_proj_moe with A of 20 columns"),
        ({"hidden": 31}, "down_proj_moe with B of"),
    ],
)
def test_files_for_other_experts_are_refused(fields, says, sound, tmp_path):
    base, data = sound
    other = replace(base, **fields)
    header, tensors = parts_of(data)
    header["__metadata__"]["base_model"] = other.fingerprint
    (tmp_path / "packed").write_bytes(joined(header, tensors))
    with pytest.raises(AdapterMalformed, match=says):
        read_packed(tmp_path / "packed").check_fits(other)


def mixture(folder: Path, **sizes: int) -> BaseModel:
    """With experts in every layer."""
    return BaseModel.read(write_model_config(folder, **TINY_QWEN3_MOE | {"mlp_only_layers": None} | sizes))


@pytest.mark.slow
def test_a_real_number_of_tensors(tmp_path):
    """36,864 tensors become four, in bounded time."""
    sizes = {"num_local_experts": 128, "num_hidden_layers": 48, "hidden_size": 16, "moe_intermediate_size": 8}
    base = mixture(tmp_path / "model", **sizes)
    source = write_random_expert_lora(tmp_path / "lora", base, 1, rank=2, dtype="bfloat16")
    header, _ = parts_of((source / "adapter_model.safetensors").read_bytes())
    assert len(header) - 1 == 128 * 3 * 48 * 2 == 36_864
    begin_s = time.thread_time()
    write_packed(read_adapter(source, base, Limits()), base, "bfloat16", tmp_path / "packed")
    seconds = time.thread_time() - begin_s  # 2.3 where this was written
    packed = read_packed(tmp_path / "packed")
    packed.check_digest()
    assert len(packed.tensors) == 4
    assert packed.metadata.experts is not None
    assert [count_of(own) for own in packed.metadata.experts.modules["down_proj_moe"].experts] == [128] * 48
    assert len(packed.metadata.manifest) < 64 * 1024  # it is in the catalog's database and a router's memory
    with (tmp_path / "packed").open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < MAX_HEADER_BYTES / 8
    assert seconds < 30


def test_packing_holds_one_layer_at_a_time(tmp_path):
    """Beside the adapter, whose values stay in the file's 16 bits, packing takes a small part of its size."""
    sizes = {"num_local_experts": 8, "num_hidden_layers": 24, "hidden_size": 512, "moe_intermediate_size": 256}
    base = mixture(tmp_path / "model", **sizes)
    source = write_random_expert_lora(tmp_path / "lora", base, 1, rank=16, dtype="bfloat16")
    file_bytes = (source / "adapter_model.safetensors").stat().st_size
    tracemalloc.start()
    adapter = read_adapter(source, base, Limits())
    held, peak_reading = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    write_packed(adapter, base, "bfloat16", tmp_path / "packed")
    _, peak_packing = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert file_bytes > 14_000_000
    assert held < 1.3 * file_bytes
    assert peak_reading < 1.5 * file_bytes
    assert peak_packing - held < 0.15 * file_bytes
