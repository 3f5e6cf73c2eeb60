"""Packed files that lie."""

import json
import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters.damaged_adapters import joined, parts_of
from support.adapters.random_adapters import write_random_mixed

from adapters.errors import AdapterError, AdapterIncompatible, AdapterMalformed, AdapterMissing
from adapters.formats import read_adapter
from adapters.model.base_model import BaseModel
from adapters.packed import read_packed, write_packed


@pytest.fixture(scope="module")
def sound(base, limits, tmp_path_factory):
    """The bytes of a packed adapter."""
    folder = tmp_path_factory.mktemp("packed")
    adapter = read_adapter(write_random_mixed(folder / "source", base, 1), base, limits)
    write_packed(adapter, base, "bfloat16", folder / "packed")
    return (folder / "packed").read_bytes()


def changed(edit):
    """What `edit` makes of the header, and the tensors as they were."""

    def change(header, tensors):
        edit(header)
        return joined(header, tensors)

    return change


def changed_metadata(**values):
    return changed(lambda header: header["__metadata__"].update(values))


def changed_tensor(name, **values):
    return changed(lambda header: header[name].update(values))


def changed_json(key, **values):
    def edit(header):
        metadata = header["__metadata__"]
        metadata[key] = json.dumps(json.loads(metadata[key]) | values)

    return changed(edit)


def changed_module(**values):
    def edit(header):
        lora = json.loads(header["__metadata__"]["lora"])
        lora["modules"]["qkv_proj"] |= values
        header["__metadata__"]["lora"] = json.dumps(lora)

    return changed(edit)


def without(name):
    return lambda header, tensors: joined({key: value for key, value in header.items() if key != name}, tensors)


LIES = {
    "empty": (lambda header, tensors: b"", "claims a header"),
    "a header longer than the file": (lambda header, tensors: b"\xff" * 8 + b"{}", "claims a header"),
    "a header that keeps an engine": (
        lambda header, tensors: joined(header | {"more": "x" * 1024**2}, tensors), "claims a header of 105"
    ),
    "a header that is no JSON": (lambda header, tensors: struct.pack("<Q", 8) + b"notjson!", "not valid JSON"),
    "a key twice": (lambda header, tensors: struct.pack("<Q", 16) + b'{"a":1, "a":2}  ', "occurs twice"),
    "cut": (lambda header, tensors: joined(header, tensors[:-2]), "follow the header"),
    "longer": (lambda header, tensors: joined(header, tensors + b"\0\0"), "follow the header"),
    "no metadata": (without("__metadata__"), "no __metadata__"),
    "another format": (changed_metadata(format="prelude-packed-9"), "prelude-packed-9"),
    "a key too many": (changed_metadata(more="x"), "exactly"),
    "metadata that is no string": (changed_metadata(dtype=7), "all strings"),
    "no revision id": (changed_metadata(revision_id="sha256:12"), "revision_id is 'sha256:12'"),
    "an unknown dtype": (changed_metadata(dtype="int8"), "dtype is 'int8'"),
    "another dtype": (changed_metadata(dtype="float32"), "tensor 'lora.down_proj.a'"),
    "unknown positions": (changed_metadata(positions="decode"), "positions is 'decode'"),
    "no fingerprint": (changed_metadata(base_model="llama"), "base_model is 'llama'"),
    "no digest": (changed_metadata(sha256="1"), "sha256 is '1'"),
    "no JSON inside": (changed_metadata(lora="{"), "lora is not valid JSON"),
    "nothing in it": (changed_metadata(lora='{"rank": 0, "modules": {}}', reft="{}"), "neither LoRA nor ReFT"),
    "LoRA undeclared": (changed_metadata(lora='{"rank": 0, "modules": {}}'), "should not have the tensors"),
    "ReFT undeclared": (changed_metadata(reft="{}"), "should not have the tensors"),
    "rank 0": (changed_json("lora", rank=0), "rank is 0"),
    "a rank one larger": (changed_json("lora", rank=5), "tensor"),
    "an unknown module": (changed_json("lora", modules={"q_proj": {}}), "modules is"),
    "a module that is no object": (changed_json("lora", modules={"o_proj": 1}), "modules is"),
    "layers that descend": (changed_module(layers=[2, 1, 0]), "layers is"),
    "a layer too many": (changed_module(layers=[0, 1, 2, 3]), "tensor 'lora.qkv_proj.a'"),
    "no layers": (changed_module(layers=[]), "layers is"),
    "a huge layer": (changed_module(layers=[0, 1, 1 << 20]), "layers is"),
    "two parts of three": (changed_module(part_rows=[48, 48]), "part_rows is"),
    "rows that do not add up": (changed_module(part_rows=[48, 24, 25]), "tensor 'lora.qkv_proj.b'"),
    "no rows": (changed_module(part_rows=[96, 0, 0]), "part_rows is"),
    "ReFT ranks of some layers": (changed_json("reft", ranks=[4, 4]), "ranks is"),
    "ReFT ranks below the tensors": (changed_json("reft", ranks=[3, 3, 3]), "tensor 'reft.a'"),
    "ReFT ranks above LoRA's": (changed_json("reft", ranks=[4, 4, 9]), "LoRA's rank of 4 is below ReFT's of 9"),
    "a tensor missing": (without("lora.qkv_proj.b"), "lacks"),
    "an A missing": (without("lora.qkv_proj.a"), "'lora.qkv_proj.a' is missing"),
    "a tensor that is no object": (lambda header, tensors: joined(header | {"reft.a": 1}, tensors), "'reft.a' is 1"),
    "a tensor of other sizes": (changed_tensor("reft.b", shape=[3, 4, 32]), "tensor 'reft.b'"),
    "a tensor of other columns": (changed_tensor("reft.a", shape=[3, 4, 16]), "tensor 'reft.a'"),
    "a tensor of negative columns": (changed_tensor("reft.a", shape=[3, 4, -32]), "tensor 'reft.a'"),
    "offsets beyond the file": (changed_tensor("reft.a", data_offsets=[1 << 40, (1 << 40) + 768]), "tensor 'reft.a'"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(name, sound, tmp_path):
    change, message = LIES[name]
    (tmp_path / "packed").write_bytes(change(*parts_of(sound)))
    with pytest.raises(AdapterMalformed) as caught:
        read_packed(tmp_path / "packed")
    assert message in str(caught.value)
    assert str(tmp_path / "packed") in str(caught.value)


def test_a_changed_bit_is_found(sound, tmp_path):
    (tmp_path / "packed").write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    packed = read_packed(tmp_path / "packed")
    with pytest.raises(AdapterMalformed, match=packed.metadata.tensors_sha256):
        packed.check_digest()


def test_another_base_model_and_sizes_that_only_claim_to_be_its_own(sound, base, tmp_path):
    path = tmp_path / "packed"
    path.write_bytes(sound)
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    read_packed(path).check_fits(base)
    for change in ({"num_layers": 2}, {"hidden": 40}, {"kv_heads": 4}, {"intermediate": 50}):
        other = BaseModel(**fields | change)
        with pytest.raises(AdapterIncompatible, match=other.fingerprint):
            read_packed(path).check_fits(other)
        path.write_bytes(changed_metadata(base_model=other.fingerprint)(*parts_of(sound)))
        with pytest.raises(AdapterMalformed, match="has not; pack the adapter again"):
            read_packed(path).check_fits(other)
        path.write_bytes(sound)


def test_what_is_no_regular_file(tmp_path, sound):
    with pytest.raises(AdapterMissing, match="cannot be read"):
        read_packed(tmp_path / "absent")
    with pytest.raises(AdapterMalformed, match="not a regular file"):
        read_packed(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(AdapterMalformed, match="not a regular file"):
        read_packed(tmp_path / "pipe")
    (tmp_path / "packed").write_bytes(sound)
    (tmp_path / "link").symlink_to(tmp_path / "packed")
    with pytest.raises(AdapterMissing, match="cannot be read"):
        read_packed(tmp_path / "link")


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_is_refused_or_leaves_a_file_that_reads_to_its_end(data, sound, tmp_path):
    damaged = bytearray(sound)
    header_bytes = 8 + int.from_bytes(sound[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(len(damaged) // 2, len(damaged))) :]
    (tmp_path / "packed").write_bytes(damaged)
    try:
        packed = read_packed(tmp_path / "packed")
    except AdapterError:
        return
    assert packed.num_bytes == len(damaged) - header_bytes
    assert sum(len(array.tobytes()) for array in packed.tensors.values()) == packed.num_bytes
