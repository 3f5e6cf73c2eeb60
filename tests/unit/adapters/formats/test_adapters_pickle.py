import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from adapters.errors import AdapterMalformed, AdapterTooLarge, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.formats.pickle_conversion import convert_pickle
from adapters.model.manifest import revision_id_of
from samples.random_adapters import write_random_lora, write_random_reft


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.fixture
def pickled(base, tmp_path):
    from safetensors.torch import load_file

    directory = write_random_lora(tmp_path / "lora", base, seed=1, dtype="bfloat16")
    weights = directory / "adapter_model.safetensors"
    expected = read_adapter(directory, base, Limits())
    torch.save(load_file(weights), directory / "adapter_model.bin")
    weights.unlink()
    return SimpleNamespace(directory=directory, revision_id=revision_id_of(expected))


def test_a_pickled_lora_is_the_same_revision(pickled, base, limits, tmp_path):
    with pytest.raises(AdapterUnsupported, match="--allow-pickle"):
        read_adapter(pickled.directory, base, limits)
    out = convert_pickle(pickled.directory, tmp_path / "new" / "out")
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert revision_id_of(read_adapter(out, base, limits)) == pickled.revision_id
    with pytest.raises(FileExistsError):
        convert_pickle(pickled.directory, out)


def test_a_pickled_preft_specification(base, limits, tmp_path):
    from safetensors.torch import load_file

    plain = write_random_reft(tmp_path / "plain", base, 3, layout="preft", kind="loreft", positions="all")
    states = {}
    for name, tensor in load_file(plain / "preft_spec.safetensors").items():
        layer, _, key = name.partition(".")
        states.setdefault(int(layer), {})[key] = tensor
    for state in states.values():
        state["_R_cache"] = torch.ones(2)  # what is derived is left behind
    blueprint = {
        "__type__": "AdapterBlueprint",
        "__qualname__": "LoReFTAdapter",
        "kwargs": {"device": "cpu", "scale": None},
    }
    spec = {"layer_indices": sorted(states), "position": "all", "sample_adapter": blueprint, "adapter_states": states}
    (tmp_path / "spec").mkdir()
    torch.save(spec, tmp_path / "spec" / "spec.pt")
    with pytest.raises(AdapterUnsupported, match="--allow-pickle"):
        read_adapter(tmp_path / "spec", base, limits)
    out = convert_pickle(tmp_path / "spec", tmp_path / "out")
    assert revision_id_of(read_adapter(out, base, limits)) == revision_id_of(read_adapter(plain, base, limits))


@pytest.mark.parametrize("name", ["adapter_model.bin", "intkey_x.bin", "spec.pt"])
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", AdapterMalformed),
        (b"garbage", AdapterMalformed),
        (pickle.dumps(Evil()), AdapterMalformed),
        (pickle.dumps([1, 2]), AdapterMalformed),
        (b"PK\x03\x04" + b"\0" * 50, AdapterMalformed),
    ],
)
def test_pickles_that_are_refused(name, content, error, tmp_path, capsys):
    directory = tmp_path / "in"
    directory.mkdir()
    (directory / name).write_bytes(content)
    (directory / ("adapter_config.json" if name.startswith("adapter") else "config.json")).write_text("{}")
    with pytest.raises(error):
        convert_pickle(directory, tmp_path / "out")
    assert "code ran" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ({"x": [1.0]}, AdapterMalformed, "not a tensor"),
        ({3: torch.ones(1)}, AdapterMalformed, "not a tensor's name"),
        ({"x": torch.ones(2, dtype=torch.float64)}, AdapterUnsupported, "float64"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, AdapterUnsupported, "complex"),
        ({"x": torch.eye(2).to_sparse()}, AdapterUnsupported, "sparse"),
        ({"x": torch.ones(1).expand(1 << 40)}, AdapterTooLarge, "bytes"),
        ({"x": torch.ones(9, 9).t()[:, ::2]}, None, ""),
    ],
)
def test_what_a_pickle_may_hold(value, error, says, tmp_path):
    (tmp_path / "in").mkdir()
    torch.save(value, tmp_path / "in" / "adapter_model.bin")
    (tmp_path / "in" / "adapter_config.json").write_text("{}")
    if error is None:
        from safetensors.torch import load_file

        out = convert_pickle(tmp_path / "in", tmp_path / "out")
        assert torch.equal(load_file(out / "adapter_model.safetensors")["x"], value["x"])
        return
    with pytest.raises(error, match=says):
        convert_pickle(tmp_path / "in", tmp_path / "out")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "not a PreFT specification"),
        ({"sample_adapter": {"__type__": "Other"}}, "not a PreFT specification"),
        ({"sample_adapter": {"__type__": "AdapterBlueprint"}}, "adapter_states"),
        ({"sample_adapter": {"__type__": "AdapterBlueprint"}, "adapter_states": {0: 3}}, "state of layer 0"),
        ({"sample_adapter": {"__type__": "AdapterBlueprint"}, "adapter_states": {0: {"w": "x"}}}, "not a tensor"),
        ({"sample_adapter": {"__type__": "AdapterBlueprint", "kwargs": [1]}, "adapter_states": {0: {}}}, "kwargs"),
        (
            {"sample_adapter": {"__type__": "AdapterBlueprint"}, "adapter_states": {0: {}}, "layer_indices": "ab"},
            "layer_indices",
        ),
    ],
)
def test_specifications_that_are_refused(spec, says, tmp_path):
    (tmp_path / "in").mkdir()
    torch.save(spec, tmp_path / "in" / "spec.pt")
    with pytest.raises((AdapterMalformed, AdapterUnsupported), match=says):
        convert_pickle(tmp_path / "in", tmp_path / "out")


def test_nothing_to_convert_and_too_much(pickled, tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(AdapterUnsupported, match="0 pickles"):
        convert_pickle(tmp_path / "in", tmp_path / "out")
    with pytest.raises(AdapterTooLarge):
        convert_pickle(pickled.directory, tmp_path / "out", Limits(max_bytes=100))


def test_transported_tensors(base, limits, tmp_path):
    """PreFT also passes tensors as bytes."""
    shapes = {"learned_source.weight": (2, 32), "learned_source.bias": (2,), "rotate_layer.weight": (2, 32)}
    state = {key: torch.randn(shape) for key, shape in shapes.items()}
    wire = {
        key: {"__adapter_t": True, "data": list(value.numpy().tobytes()), "dtype": "bfloat16", "wire_dtype": "float32",
              "shape": list(value.shape)}
        for key, value in state.items()
    }  # fmt: skip
    blueprint = {"__type__": "AdapterBlueprint", "__qualname__": "DiReFTAdapter", "kwargs": {}}
    (tmp_path / "in").mkdir()
    torch.save({"sample_adapter": blueprint, "adapter_states": {1: wire}}, tmp_path / "in" / "spec.pt")
    out = convert_pickle(tmp_path / "in", tmp_path / "out")
    assert json.loads((out / "preft_spec.json").read_text())["layer_indices"] == [1]
    factors = read_adapter(out, base, limits).reft[1]
    assert factors.dtype == "bfloat16"
    assert torch.equal(torch.from_numpy(factors.a.copy()), state["learned_source.weight"].bfloat16().float())
