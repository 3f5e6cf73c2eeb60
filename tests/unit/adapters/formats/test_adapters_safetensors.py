import json
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file as load_torch
from support.adapters.damaged_adapters import write_raw

from adapters.errors import AdapterError, AdapterMalformed
from adapters.formats.folder import AdapterFolder, Limits
from adapters.formats.safetensors_file import encode, float32_to_bfloat16, open_safetensors, write_safetensors
from adapters.model.normal_form import bfloat16_to_float32

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def read_all(directory):
    with open_safetensors(AdapterFolder(directory, Limits()), "t.safetensors") as file:
        return {tensor: file.read(tensor) for tensor in file.tensors}


@given(st.lists(FINITE, min_size=1))
def test_bfloat16_rounds_as_torch_does(values):
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16).float().numpy()
    assert np.array_equal(bfloat16_to_float32(float32_to_bfloat16(array)), expected)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    write_safetensors(tmp_path / "t.safetensors", {"x": encode(np.ones((100, 100)), "float32")})
    with open_safetensors(AdapterFolder(tmp_path, Limits()), "t.safetensors") as file:
        os.truncate(tmp_path / "t.safetensors", 1000)
        with pytest.raises(AdapterMalformed, match="changed while it was read"):
            file.read("x")


@settings(max_examples=300)
@given(data=st.data())
@pytest.mark.slow
def test_no_damage_to_a_file_crashes_or_allocates_what_it_claims(tmp_path, data):
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"x": encode(np.ones((2, 3)), "float32"), "y": encode(np.ones(4), "bfloat16")})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "grow", "number", "insert"]))
        at = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        if kind == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del raw[at:]
        elif kind == "grow":
            raw += data.draw(st.binary(max_size=9))
        elif kind == "number":
            raw[:8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        else:
            raw[at:at] = data.draw(st.sampled_from([b"9", b"-", b"}", b'"', b"null", b"1e9", b"[", b"\x00", b"\xff"]))
    path.write_bytes(bytes(raw))
    try:
        read_all(tmp_path)
    except AdapterError:
        return
    # What is still accepted must be sound to the reference implementation too.
    load_torch(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(entry=JSON, body=st.binary(max_size=32))
def test_no_header_crashes(tmp_path, entry, body):
    write_raw(tmp_path / "t.safetensors", json.dumps({"x": entry}).encode(), body)
    with pytest.raises(AdapterError):
        read_all(tmp_path)


@settings(max_examples=200)
@given(
    shape=st.lists(st.integers(-1, 2**62), max_size=9), begin=st.integers(-1, 2**63), size=st.integers(-1, 2**63),
    dtype=st.sampled_from(["F32", "BF16", "F8_E4M3", "I64"]),
)  # fmt: skip
def test_no_claim_about_sizes_is_believed(tmp_path, shape, begin, size, dtype):
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
    write_raw(tmp_path / "t.safetensors", {"x": entry}, bytes(16))
    try:
        arrays = read_all(tmp_path)
    except AdapterError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= 32  # 16 bytes of bfloat16 are 32 of float32
