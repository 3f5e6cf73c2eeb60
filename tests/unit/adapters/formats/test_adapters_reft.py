"""ReFT in Prelude's own layout: what it computes, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file
from support.adapters.damaged_adapters import read_raw, write_raw
from support.adapters.random_adapters import write_random_mixed, write_random_reft

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats import Limits, read_adapter


@pytest.mark.parametrize("kind", ["direft", "loreft"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_kind_folds_to_what_it_computes(kind, dtype, base, limits, tmp_path):
    """h + s R^T (W h + b), less R h in the bracket for LoReFT, from the same stored values."""
    directory = write_random_reft(tmp_path / "r", base, 5, kind=kind, dtype=dtype, scale=0.7)
    tensors = load_file(directory / "adapter.safetensors")
    names = ("W", "R", "bias") if kind == "loreft" else ("A", "B", "bias")
    w, r, b = (tensors[f"reft.2.{name}"].float().numpy() for name in names)
    h = np.random.default_rng(0).normal(size=(11, base.hidden))
    expected = 0.7 * (h @ w.T + b - (h @ r.T if kind == "loreft" else 0)) @ r
    factors = read_adapter(directory, base, limits).reft[2]
    assert np.abs(factors.scale * ((h @ factors.a.T + factors.bias) @ factors.b) - expected).max() < 1e-5
    assert factors.dtype == dtype


def test_scales_that_are_not_said(base, limits, tmp_path):
    for kind, scale in (("direft", 0.5), ("loreft", 1)):
        directory = write_random_reft(tmp_path / kind, base, 1, rank=4, kind=kind)
        assert read_adapter(directory, base, limits).reft[0].scale == scale


def test_the_deployments_limits(base, tmp_path):
    with pytest.raises(AdapterIncompatible, match=r"reft\.0 has rank 4, over"):
        read_adapter(write_random_reft(tmp_path / "r", base, 1), base, Limits(max_rank=3))
    with pytest.raises(AdapterIncompatible, match=r"changes down_proj.*add it to adapter_limits\.target_modules"):
        read_adapter(write_random_mixed(tmp_path / "m", base, 1), base, Limits(target_modules=("q_proj",)))


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
        ({"reft": ...}, AdapterMalformed, "disagree on whether there is reft"),
    ],
)
def test_our_own_headers_that_are_refused(fields, error, says, base, limits, tmp_path):
    directory = write_random_mixed(tmp_path / "p", base, 1)
    header = json.loads((directory / "prelude_adapter.json").read_text()) | fields
    written = {key: value for key, value in header.items() if value is not ...}
    (directory / "prelude_adapter.json").write_text(json.dumps(written))
    with pytest.raises(error, match=says):
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
