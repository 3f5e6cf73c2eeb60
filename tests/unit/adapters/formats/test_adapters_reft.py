"""Every ReFT format against modules built with torch, as their authors define them."""

import json

import numpy as np
import pytest
import torch
from support.adapters.damaged_adapters import read_raw, write_raw
from support.adapters.random_adapters import write_random_mixed, write_random_reft
from torch.nn.utils.parametrizations import orthogonal

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats import read_adapter
from adapters.formats.pickle_conversion import convert_pickle
from adapters.formats.reft_kinds import KINDS
from adapters.formats.reft_state import rotation_of
from adapters.formats.safetensors_file import encode, write_safetensors

HIDDEN, RANK = 32, 4
TYPES = "<class 'pyreft.interventions.{}Intervention'>"


class Rotation(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape))


def trained_rotation(rows, columns):
    """An orthogonal parametrisation some steps away from its start, as training leaves it."""
    module = orthogonal(Rotation((rows, columns)))
    with torch.no_grad():
        module.parametrizations.weight.original.add_(0.3 * torch.randn(rows, columns).tril(-1))
    return module


@pytest.mark.parametrize(("rows", "columns"), [(HIDDEN, RANK), (HIDDEN, 1), (8, 7), (5, 4)])
@pytest.mark.parametrize("trivialized", [True, False])
def test_the_rotation_is_that_of_torch(rows, columns, trivialized):
    torch.manual_seed(rows + columns)
    module = orthogonal(Rotation((rows, columns)), use_trivialization=trivialized)
    with torch.no_grad():
        module.parametrizations.weight.original.add_(torch.randn(rows, columns).tril(-1))
    parametrization = module.parametrizations.weight
    base = parametrization[0].base.numpy() if trivialized else None
    ours = rotation_of(parametrization.original.detach().numpy(), base, "test")
    assert np.abs(ours - module.weight.detach().numpy()).max() < 1e-5
    assert np.abs(ours.T @ ours - np.eye(columns)).max() < 1e-5


def delta(factors, h):
    h = h.numpy().astype(np.float64)
    return factors.scale * ((h @ factors.a.T + factors.bias) @ factors.b)


def module_of(kind):
    """(state as pyreft saves it, the delta) of a module as pyreft defines it."""
    torch.manual_seed(1)
    rotation, source = trained_rotation(HIDDEN, RANK), torch.nn.Linear(HIDDEN, RANK)
    rotated = {f"rotate_layer.{k}": v for k, v in rotation.state_dict().items()}
    learned = {f"learned_source.{k}": v for k, v in source.state_dict().items()}
    r = rotation.weight
    return {
        "loreft": (
            {"weight": source.weight, "bias": source.bias, "rotate_layer": r},
            lambda h: (source(h) - h @ r) @ r.T,
        ),
        "direft": (rotated | learned, lambda h: source(h) @ r.T),
    }[kind]


def write_pyreft(
    directory, states, kind, config=None, keys="layer_{}_comp_block_output_unit_pos_nunit_1#0", suffix="safetensors"
):
    directory.mkdir()
    for layer, state in states.items():
        state = {k: v.detach().contiguous() for k, v in state.items()}
        path = directory / f"intkey_{keys.format(layer)}.{suffix}"
        if suffix == "bin":
            torch.save(state, path)
        else:
            write_safetensors(path, {k: encoded(v) for k, v in state.items()})
    fields = {
        "representations": [[layer, "block_output", "pos", 1, RANK, *[None] * 8] for layer in states],
        "intervention_types": [TYPES.format(kind.capitalize())] * len(states),
    }
    (directory / "config.json").write_text(json.dumps(fields | (config or {})))
    return directory


def encoded(tensor):
    if tensor.dtype == torch.int64:
        return "I64", tuple(tensor.shape), tensor.numpy().tobytes()
    return encode(tensor.float().numpy(), str(tensor.dtype).removeprefix("torch."))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kind_of_pyreft_folds_to_what_it_computes(kind, dtype, base, limits, tmp_path):
    state, compute = module_of(kind)
    state = {k: v.detach() for k, v in state.items()} | {
        "embed_dim": torch.tensor(HIDDEN),
        "interchange_dim": torch.tensor(HIDDEN),
    }
    if dtype is torch.bfloat16:  # pyreft keeps the source in bfloat16
        for name in [k for k in state if k in ("weight", "bias") or k.startswith("learned_source.")]:
            state[name] = state[name].to(dtype)
    directory = write_pyreft(tmp_path / "pyreft", {0: state, 2: state}, kind)
    adapter = read_adapter(directory, base, limits)
    assert (set(adapter.reft), adapter.positions, adapter.kinds) == ({0, 2}, "prefill", ("reft",))
    h = torch.randn(9, HIDDEN)
    with torch.no_grad():
        expected = compute(h).numpy()
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    assert np.abs(delta(adapter.reft[2], h) - expected).max() < tolerance
    assert adapter.reft[0].scale == 1


@pytest.mark.parametrize("layout", ["prelude", "pyreft"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folded_loreft_equals_unfolded(layout, dtype, base, limits, tmp_path):
    """h + R^T (W h + b - R h), computed as it stands, from the same stored values."""
    directory = write_random_reft(
        tmp_path / "r", base, 5, kind="loreft", layout=layout, dtype=dtype, parametrized=False
    )
    file = next(directory.glob("*.safetensors")) if layout != "pyreft" else sorted(directory.glob("*.safetensors"))[0]
    from safetensors.torch import load_file

    tensors = load_file(file)
    prefix = {"prelude": "reft.0.", "pyreft": ""}[layout]
    names = {"prelude": ("W", "R", "bias"), "pyreft": ("weight", "rotate_layer", "bias")}[layout]
    w, r, b = (tensors[prefix + name].float() for name in names)
    r = r.T if layout == "pyreft" else r
    h = torch.randn(11, HIDDEN)
    expected = (h @ w.T + b - h @ r.T) @ r
    factors = read_adapter(directory, base, limits).reft[0]
    assert np.abs(delta(factors, h) - expected.numpy()).max() < 1e-5
    assert factors.dtype == dtype


def test_scales(base, limits, tmp_path):
    def scale(name, **options):
        return read_adapter(write_random_reft(tmp_path / name, base, 1, rank=4, **options), base, limits).reft[0].scale

    assert scale("a", kind="direft") == 0.5
    assert scale("b", kind="loreft") == 1
    assert scale("c", kind="direft", scale=3) == 3
    assert scale("g", kind="direft", layout="pyreft") == 1


@pytest.mark.parametrize(
    "keys",
    ["layer_{}_comp_block_output_unit_pos_nunit_1#0", "layer.{}.comp.block_output.unit.pos.nunit.1#0",
     "layer.{}.repr.block_output.unit.pos.nunit.1#0"],
)  # fmt: skip
def test_file_names_of_all_versions_of_pyvene(keys, base, limits, tmp_path):
    directory = write_pyreft(tmp_path / "p", {1: module_of("direft")[0]}, "direft", keys=keys)
    assert set(read_adapter(directory, base, limits).reft) == {1}


def test_components_by_path_and_representations_as_objects(base, limits, tmp_path):
    representation = {"component": "model.layers[2].output", "low_rank_dimension": RANK}
    directory = write_pyreft(
        tmp_path / "p", {2: module_of("loreft")[0]}, "loreft", {"representations": [representation]},
        keys="comp_model_layers[{}]_output_unit_pos_nunit_1#0",
    )  # fmt: skip
    assert set(read_adapter(directory, base, limits).reft) == {2}


def representations(**fields):
    names = ("layer", "component", "unit", "max_number_of_units", "low_rank_dimension")
    values = dict(zip(names, (1, "block_output", "pos", 1, RANK), strict=True)) | fields
    return {"representations": [values]}


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (representations(component="mlp_output"), AdapterUnsupported, "mlp_output"),
        (representations(unit="h.pos"), AdapterUnsupported, "h.pos"),
        (representations(layer="1"), AdapterMalformed, "integers"),
        (representations(layer=7, component="model.layers[7].output"), AdapterIncompatible, "layer 7"),
        (representations(subspace_partition=[[0, 2]]), AdapterUnsupported, "subspace_partition"),
        (representations(low_rank_dimension=9), AdapterMalformed, "low_rank_dimension 9"),
        ({"representations": []}, AdapterMalformed, "representations"),
        ({"representations": [3]}, AdapterMalformed, "representations"),
        ({"intervention_types": []}, AdapterMalformed, "intervention_types"),
        ({"intervention_types": ["Vanilla"]}, AdapterUnsupported, "Vanilla"),
        ({"intervention_types": [TYPES.format("Subloreft")]}, AdapterUnsupported, "Subloreft"),
        ({"intervention_types": [TYPES.format("Noreft")]}, AdapterUnsupported, "Noreft.* loreft, direft"),
        ({"intervention_types": [None]}, AdapterUnsupported, "None"),
        ({"representations": representations()["representations"] * 2,
          "intervention_types": [TYPES.format("Direft")] * 2}, AdapterUnsupported, "twice"),
        (representations(layer=2), AdapterMalformed, "has no intkey_layer_2"),
    ],
)  # fmt: skip
def test_pyreft_directories_that_are_refused(config, error, says, base, limits, tmp_path):
    directory = write_pyreft(tmp_path / "p", {1: module_of("direft")[0]}, "direft", config)
    with pytest.raises(error, match=says):
        read_adapter(directory, base, limits)


ORIGINAL, BASE = (f"rotate_layer.parametrizations.weight.{part}" for part in ("original", "0.base"))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"surprise": torch.ones(2)}, AdapterMalformed, "'surprise'"),
        ({"learned_source.bias": None}, AdapterMalformed, "'learned_source.bias'"),
        ({"learned_source.bias": torch.ones(RANK + 1)}, AdapterMalformed, "learned_source.bias has the shape"),
        ({"learned_source.weight": torch.ones(RANK + 1, HIDDEN)}, AdapterMalformed, "rank 5, the rotation 4"),
        ({"learned_source.weight": torch.ones(RANK, HIDDEN + 1)}, AdapterIncompatible, "made for another model"),
        ({"learned_source.weight": torch.full((RANK, HIDDEN), torch.nan)}, AdapterMalformed, "finite"),
        ({"learned_source.weight": torch.ones(RANK, HIDDEN, dtype=torch.int64)}, AdapterUnsupported, "I64"),
        ({"embed_dim": torch.tensor(64)}, AdapterIncompatible, "embed_dim is 64"),
        ({"embed_dim": torch.ones(3)}, AdapterMalformed, "one integer"),
        ({ORIGINAL: torch.ones(HIDDEN, HIDDEN)}, AdapterMalformed, "rank"),
        ({ORIGINAL: torch.ones(HIDDEN, 0)}, AdapterMalformed, "rank"),
        ({ORIGINAL: torch.eye(HIDDEN, 17), "learned_source.weight": torch.ones(17, HIDDEN),
          "learned_source.bias": torch.ones(17)}, AdapterIncompatible, "rank 17, over"),
        ({BASE: torch.ones(HIDDEN, 2)}, AdapterMalformed, "base of a rotation"),
    ],
)  # fmt: skip
def test_reft_states_that_are_refused(change, error, says, base, limits, tmp_path):
    state = module_of("direft")[0] | change
    state = {k: v for k, v in state.items() if v is not None}
    directory = write_pyreft(tmp_path / "p", {1: state}, "direft")
    config = json.loads((directory / "config.json").read_text())
    config["representations"][0][4] = None
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=says):
        read_adapter(directory, base, limits)


def test_a_file_that_the_configuration_does_not_mention(base, limits, tmp_path):
    directory = write_random_reft(tmp_path / "p", base, 1, layout="pyreft")
    (directory / "intkey_layer_9_comp_block_output_unit_pos_nunit_1#0.safetensors").write_bytes(b"")
    with pytest.raises(AdapterMalformed, match="does not mention intkey_layer_9"):
        read_adapter(directory, base, limits)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"format": "prelude-adapter-2"}, AdapterUnsupported, "prelude-adapter-2"),
        ({"format": None}, AdapterUnsupported, "format"),
        ({"base_model": "0123456789abcdef"}, AdapterIncompatible, "made for another model"),
        ({"base_model": 3}, AdapterMalformed, "base_model"),
        ({"positions": "decode"}, AdapterMalformed, "positions"),
        ({"more": 1}, AdapterMalformed, "'more' is not a field"),
        ({"lora": {"scale": "2"}}, AdapterMalformed, "finite number"),
        ({"lora": {}}, AdapterMalformed, "object with a scale"),
        ({"lora": [2]}, AdapterMalformed, "lora is"),
        ({"lora": {"scale": 1, "alpha": 2}}, AdapterMalformed, "'alpha' is not a field"),
        ({"reft": {"scales": {"7": 2}}}, AdapterMalformed, "'scales' is not a field"),
        ({"reft": {"kind": "noreft"}}, AdapterUnsupported, "noreft"),
        ({"reft": {"kind": []}}, AdapterUnsupported, "kind"),
        ({"reft": {"kind": "loreft"}}, AdapterMalformed, "must have W, R, bias"),
    ],
)
def test_our_own_headers_that_are_refused(fields, error, says, base, limits, tmp_path):
    directory = write_random_mixed(tmp_path / "p", base, 1)
    header = json.loads((directory / "prelude_adapter.json").read_text()) | fields
    (directory / "prelude_adapter.json").write_text(json.dumps(header))
    with pytest.raises(error, match=says):
        read_adapter(directory, base, limits)


def test_our_own_sections_and_tensors_must_agree(base, limits, tmp_path):
    directory = write_random_mixed(tmp_path / "p", base, 1)
    header = json.loads((directory / "prelude_adapter.json").read_text())
    del header["reft"]
    (directory / "prelude_adapter.json").write_text(json.dumps(header))
    with pytest.raises(AdapterMalformed, match="disagree on whether there is reft"):
        read_adapter(directory, base, limits)


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        ("lora.0.q_proj.A", "lora.0.q_proj.C", AdapterMalformed, "not known"),
        ("lora.0.q_proj.A", "lora.9.q_proj.A", AdapterIncompatible, "layer 9"),
        ("lora.0.q_proj.A", "lora.0.x_proj.A", AdapterIncompatible, "modules of a layer"),
        ("lora.0.q_proj.A", "lora.00.q_proj.A", AdapterMalformed, "not known"),
        ("reft.0.bias", "reft.0.W", AdapterMalformed, "must have A, B, bias"),
        ("reft.0.bias", "reft.5.bias", AdapterIncompatible, "layer 5"),
    ],
)
def test_our_own_tensor_names(old, new, error, says, base, limits, tmp_path):
    directory = write_random_mixed(tmp_path / "p", base, 1)
    header, body = read_raw(directory / "adapter.safetensors")
    write_raw(directory / "adapter.safetensors", {new if k == old else k: v for k, v in header.items()}, body)
    with pytest.raises(error, match=says):
        read_adapter(directory, base, limits)


def test_pickles_are_refused_until_they_are_converted(base, limits, tmp_path):
    from adapters.model.manifest import revision_id_of

    state = module_of("direft")[0]
    pickled = write_pyreft(tmp_path / "pickled", {1: state}, "direft", suffix="bin")
    with pytest.raises(AdapterUnsupported, match="--allow-pickle"):
        read_adapter(pickled, base, limits)
    converted = convert_pickle(pickled, tmp_path / "converted")
    plain = write_pyreft(tmp_path / "plain", {1: state}, "direft")
    assert revision_id_of(read_adapter(converted, base, limits)) == revision_id_of(read_adapter(plain, base, limits))
