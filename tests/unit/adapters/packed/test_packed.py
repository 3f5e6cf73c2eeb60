import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.adapters.serving_form import ServingForm

from adapters.errors import AdapterIncompatible
from adapters.formats import read_adapter
from adapters.formats.folder import Limits
from adapters.formats.safetensors_file import encode
from adapters.identity import SCALE_STEPS
from adapters.model.base_model import FUSED_MODULES, MLP_MODULES, BaseModel, Experts, name_of_module
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter, ExpertFactors, LoraFactors, ReftFactors, frozen_array, widened
from adapters.packed import PACKED_NAME, read_packed, scale_packed, write_for_engine, write_packed
from adapters.packed.export import export_packed
from adapters.verification.reference import UNLIMITED

DTYPES = ["float32", "bfloat16", "float16"]
STACKS = (*FUSED_MODULES.values(), ("o_proj",), ("down_proj",))
EXPERT_STACKS = (("gate_proj", "up_proj"), ("down_proj",))


def stored(values: np.ndarray, dtype: str) -> bytes:
    return encode(values.astype(np.float32), dtype)[2]


def bits_of(tensor) -> bytes:
    import torch

    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def assert_holds(adapter: Adapter, base: BaseModel, dtype: str, folder: Path) -> None:
    """Bit for bit: factors padded with zeros to one rank, scales folded into B, siblings of stacks whole or absent."""
    write_for_engine(adapter, base, dtype, folder / "engine")
    packed = read_packed(folder / "engine" / PACKED_NAME)
    packed.check_digest()
    packed.check_fits(base)
    form, rank = ServingForm.read(folder / "engine"), adapter.max_rank
    expert_rank = max((factors.rank for factors in adapter.experts.values()), default=0)
    wanted: dict[object, tuple[LoraFactors | ExpertFactors | None, tuple[int, int], int]] = {}
    touched = set()
    for layer, stack in product(range(base.num_layers), STACKS):
        if any((layer, part) in adapter.lora for part in stack):
            touched |= set(stack)
            for part in stack:
                wanted[name_of_module(layer, part)] = adapter.lora.get((layer, part)), base.shape_of(part), rank
    for (layer, expert), stack in product({place[:2] for place in adapter.experts}, EXPERT_STACKS):
        if any((layer, expert, part) in adapter.experts for part in stack):
            touched |= set(stack)
            for part in stack:
                place = (layer, expert, part)
                wanted[place] = adapter.experts.get(place), base.expert_shape_of(part), expert_rank
    found = {**form.lora, **form.experts}
    assert found.keys() == wanted.keys()
    for place, (factors, (size_out, size_in), padded) in wanted.items():
        a, b = np.zeros((padded, size_in)), np.zeros((size_out, padded))
        if factors is not None:
            a[: factors.rank] = factors.a
            b[:, : factors.rank] = factors.b.astype(np.float64) * factors.scale
        assert bits_of(found[place][0]) == stored(a, dtype), place
        assert bits_of(found[place][1]) == stored(b.astype(np.float32) + np.float32(0), dtype), place  # no -0.0
    assert form.reft.keys() == adapter.reft.keys()
    for layer, own in adapter.reft.items():
        parts = (own.a, own.b * np.float32(own.scale) + np.float32(0), own.bias)
        for tensor, values in zip(form.reft[layer], parts, strict=True):
            assert bits_of(tensor[: own.rank]) == stored(values, dtype), layer
            assert not tensor[own.rank :].any()
    assert packed.metadata.revision_id == revision_id_of(adapter)
    assert packed.metadata.manifest == Manifest.of(adapter).to_json()
    assert (packed.metadata.positions, packed.metadata.dtype) == (adapter.positions, dtype)
    config = json.loads((folder / "engine" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == rank
    assert set(config["target_modules"]) == touched
    assert config["prelude"] == {
        "revision_id": revision_id_of(adapter),
        "dtype": dtype,
        "positions": adapter.positions,
        "memory_only": False,
    }


@st.composite
def mixtures(draw) -> BaseModel:
    num_layers = draw(st.integers(1, 4))
    layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    return BaseModel(
        "Qwen3MoeForCausalLM", num_layers, hidden=draw(st.integers(1, 6)), intermediate=5, heads=2, kv_heads=1,
        head_dim=3, vocabulary=10,
        experts=Experts(draw(st.integers(1, 7)), draw(st.integers(1, 5)), tuple(sorted(layers))),
    )  # fmt: skip


@st.composite
def adapters(draw, base: BaseModel) -> Adapter:
    """Any adapter of the base model: each projection of each layer with a rank and a scale of its own, or without."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks = st.one_of(st.just(0), st.integers(1, 5))
    scales = st.one_of(st.just(1.0), st.just(0.0), st.floats(-8, 8))
    largest = draw(st.sampled_from([1e-30, 1e-6, 1.0, 100.0]))

    def values(*shape: int) -> np.ndarray:
        return frozen_array(generator.normal(0, largest, shape) * generator.integers(0, 2, shape))

    def lora(module: str, rank: int) -> LoraFactors:
        size_out, size_in = base.shape_of(module)
        return LoraFactors(values(rank, size_in), values(size_out, rank), draw(scales), "float32")

    def expert(module: str, rank: int) -> ExpertFactors:
        size_out, size_in = base.expert_shape_of(module)
        a, b = (values(*shape).astype("<f2") for shape in ((rank, size_in), (size_out, rank)))
        return ExpertFactors(a, b, draw(scales), "float16")

    def reft(rank: int) -> ReftFactors:
        return ReftFactors(values(rank, base.hidden), values(rank, base.hidden), values(rank), draw(scales), "float32")

    places = [(layer, module) for layer in range(base.num_layers) for module in base.modules_of(layer)]
    chosen = {place: rank for place in places if (rank := draw(ranks))}
    streams = {layer: rank for layer in range(base.num_layers) if (rank := draw(ranks))}
    experts = set()
    if base.experts is not None:
        every = list(product(base.experts.layers, range(base.experts.count), MLP_MODULES))
        experts = draw(st.sets(st.sampled_from(every), min_size=1, max_size=12))
    elif not chosen and not streams:
        streams = {0: 1}
    return Adapter(
        lora={(layer, module): lora(module, rank) for (layer, module), rank in chosen.items()},
        reft={layer: reft(rank) for layer, rank in streams.items()},
        positions=draw(st.sampled_from(["prefill", "all"])),
        base_fingerprint=base.fingerprint,
        num_file_bytes=0,
        experts={place: expert(place[2], draw(st.integers(1, 4))) for place in experts},
    )


@pytest.mark.parametrize("kind", ["dense", pytest.param("mixture", marks=pytest.mark.slow)])
@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_adapter_is_held_and_comes_back(kind, data, dtype, base):
    base = base if kind == "dense" else data.draw(mixtures())
    adapter = data.draw(adapters(base))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        assert_holds(adapter, base, dtype, folder)
        # An export packs to the same values again; of those that were rounded to zero, the sign goes.
        packed = read_packed(folder / "engine" / PACKED_NAME)
        export_packed(packed, folder / "out")
        exported = read_adapter(folder / "out", base, UNLIMITED)
        assert (exported.positions, exported.max_rank) == (adapter.positions, adapter.max_rank)
        write_packed(exported, base, dtype, folder / "again")
        again = read_packed(folder / "again")
        assert again.tensors.keys() == packed.tensors.keys()
        for name, tensor in again.tensors.items():
            assert np.array_equal(widened(tensor), widened(packed.tensors[name])), name


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@settings(max_examples=30)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), steps=st.integers(1, 40))
def test_a_scale_multiplies_the_last_factor_and_nothing_else(kind, data, dtype, steps, base):
    base, scale = base if kind == "dense" else data.draw(mixtures()), steps / SCALE_STEPS
    adapter = data.draw(adapters(base))
    with tempfile.TemporaryDirectory() as made:
        own, scaled = Path(made) / "own", Path(made) / "scaled"
        write_for_engine(adapter, base, dtype, own)
        shutil.copytree(own, scaled)
        scale_packed(scaled / PACKED_NAME, scale)
        before, after = ServingForm.read(own), ServingForm.read(scaled)
        metadata = [read_packed(each / PACKED_NAME).metadata for each in (own, scaled)]
        assert metadata[0] == metadata[1]
    for old, new in ((before.lora, after.lora), (before.reft, after.reft), (before.experts, after.experts)):
        assert old.keys() == new.keys()
        for place, tensors in old.items():
            a, b, *bias = new[place]
            assert bits_of(b) == stored(tensors[1].float().numpy() * np.float32(scale), dtype), place
            assert [bits_of(each) for each in (a, *bias)] == [bits_of(each) for each in (tensors[0], *tensors[2:])]


def test_a_scale_that_does_not_fit_is_refused(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "source", base, 1), base, limits)
    large = {key: replace(f, b=frozen_array(np.full_like(f.b, 4e4)), scale=1.0) for key, f in adapter.lora.items()}
    write_packed(replace(adapter, lora=large), base, "float16", tmp_path / "packed")
    scale_packed(tmp_path / "packed", 1.5)
    with pytest.raises(AdapterIncompatible, match=r"b at adapter_scale 1.5 has a value of .* too large for float16"):
        scale_packed(tmp_path / "packed", 1.5)


def test_arrays_are_views_of_the_file_that_nobody_can_write_to(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "source", base, 1), base, limits)
    write_packed(adapter, base, "float32", tmp_path / "packed")
    packed = read_packed(tmp_path / "packed")
    whole = np.frombuffer(packed.data, np.uint8)
    for array in packed.tensors.values():
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable
    assert packed.num_bytes == sum(array.nbytes for array in packed.tensors.values())
    (tmp_path / "packed").unlink()
    packed.check_digest()  # a deleted file stays mapped


def test_the_same_adapter_gives_the_same_bytes(base, limits, tmp_path):
    source = write_random_mixed(tmp_path / "source", base, 1)
    digests = set()
    for name in ("first", "second"):
        write_packed(read_adapter(source, base, limits), base, "bfloat16", tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_what_does_not_fit_is_refused_and_nothing_is_written(base, tmp_path):
    limits = Limits(max_rank=16)
    adapter = read_adapter(write_random_lora(tmp_path / "source", base, 1, alpha=8e6), base, limits)
    with pytest.raises(
        AdapterIncompatible, match=r"layer 0 down_proj: the scaled B has a value of .* too large for float16"
    ):
        write_packed(adapter, base, "float16", tmp_path / "packed")
    with pytest.raises(AdapterIncompatible, match=base.fingerprint):
        write_packed(replace(adapter, base_fingerprint="0" * 16), base, "float32", tmp_path / "packed")
    reft = read_adapter(write_random_reft(tmp_path / "reft", base, 1, scale=1e38), base, limits)
    with pytest.raises(AdapterIncompatible, match="layer 0 ReFT: the scaled B"):
        write_packed(replace(reft, reft={0: replace(reft.reft[0], scale=1e39)}), base, "bfloat16", tmp_path / "packed")
    # 3.4e38 is a float32 but rounds to infinity as a bfloat16.
    edge = {key: replace(f, b=frozen_array(np.full_like(f.b, 3.4e38)), scale=1.0) for key, f in adapter.lora.items()}
    with pytest.raises(AdapterIncompatible, match="too large for bfloat16"):
        write_packed(replace(adapter, lora=edge), base, "bfloat16", tmp_path / "packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reft", "source"]
    write_packed(replace(adapter, lora=edge), base, "float32", tmp_path / "packed")
