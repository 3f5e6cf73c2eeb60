import shutil
from dataclasses import replace

import numpy as np
import pytest
from support.adapters.damaged_adapters import edit_config, read_raw, write_raw
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft

from adapters.formats import read_adapter
from adapters.model.base_model import MODULES
from adapters.model.manifest import Manifest, revision_id_of
from adapters.model.normal_form import Adapter, LoraFactors, ReftFactors, frozen_array


@pytest.fixture
def lora(base, tmp_path):
    return write_random_lora(tmp_path / "lora", base, seed=1, rank=4)


def digest(directory, base, limits):
    return revision_id_of(read_adapter(directory, base, limits))


def test_the_revision_id_is_pinned(base):
    """A change of this value re-imports every adapter there is: it must be meant."""
    ones = frozen_array(np.ones((1, 32)))
    lora = {(0, "q_proj"): LoraFactors(ones, frozen_array(np.ones((48, 1))), 0.5, "bfloat16")}
    adapter = Adapter(lora, {}, "prefill", "0" * 16, 7)
    assert Manifest.of(adapter).to_json() == (
        '{"base_model":"0000000000000000","kinds":["lora"],"lora":[{"dtype":"bfloat16","layer":0,"module":"q_proj",'
        '"rank":1,"scale":0.5,"size_in":32,"size_out":48}],"positions":"prefill","reft":[]}'
    )
    assert revision_id_of(adapter) == "sha256:d2a569f3fd74b0fa34d9eb3bf4ab12256064ec8fbf09eac4ac0e1a35ec14bbbe"


def test_what_does_not_change_the_revision(base, limits, lora, tmp_path):
    expected = digest(lora, base, limits)
    header, body = read_raw(lora / "adapter_model.safetensors")

    def variant(name, header, body):
        directory = shutil.copytree(lora, tmp_path / name)
        write_raw(directory / "adapter_model.safetensors", header, body)
        return directory

    metadata = header.pop("__metadata__")
    spelled = {
        "no metadata": header,
        "header reversed": dict(reversed(header.items())) | {"__metadata__": metadata},
        "default adapter": {k.replace(".weight", ".default.weight"): v for k, v in header.items()},
        "named adapter": {k.replace(".weight", ".my-name.weight"): v for k, v in header.items()},
        "no prefix": {k.removeprefix("base_model.model."): v for k, v in header.items()},
        "base of its own": {k.replace("model.model.layers", "model.layers"): v for k, v in header.items()},
    }
    for name, changed in spelled.items():
        assert digest(variant(name, changed, body), base, limits) == expected, name
    reordered, new_body = {}, b""
    for name, entry in reversed(header.items()):
        begin, end = entry["data_offsets"]
        reordered[name] = entry | {"data_offsets": [len(new_body), len(new_body) + end - begin]}
        new_body += body[begin:end]
    assert digest(variant("bytes reordered", reordered, new_body), base, limits) == expected
    for name, fields in {
        "same scale": {"lora_alpha": 4, "r": 4, "alpha_pattern": dict.fromkeys(MODULES, 16)},
        "regex": {"target_modules": ".*_proj"},
        "all": {"target_modules": "all-linear"},
        "path": {"base_model_name_or_path": "elsewhere", "lora_dropout": 0.5, "revision": "main"},
    }.items():
        directory = shutil.copytree(lora, tmp_path / name)
        edit_config(**fields)(directory)
        (directory / "README.md").write_text("hello")
        assert digest(directory, base, limits) == expected, name


def test_what_changes_the_revision(base, limits, lora):
    adapter = read_adapter(lora, base, limits)
    key = (1, "q_proj")
    factors = adapter.lora[key]
    nudged = factors.a.copy()
    nudged[0, 0] = np.nextafter(nudged[0, 0], 9)
    negative_zero = factors.b.copy()
    negative_zero[0, 0] = -0.0
    reft = ReftFactors(factors.a, factors.a, frozen_array(np.zeros(4)), 1.0, "float32")
    without = {k: f for k, f in adapter.lora.items() if k != key}
    variants = {
        "value": adapter.lora | {key: replace(factors, a=frozen_array(nudged))},
        "sign of zero": adapter.lora | {key: replace(factors, b=frozen_array(negative_zero))},
        "zero": adapter.lora | {key: replace(factors, b=frozen_array(np.where(negative_zero == 0, 0, negative_zero)))},
        "scale": adapter.lora | {key: replace(factors, scale=np.nextafter(factors.scale, 9))},
        "dtype": adapter.lora | {key: replace(factors, dtype="bfloat16")},
        "fewer": without,
        "module": without | {(1, "other"): factors},
        "layer": without | {(9, "q_proj"): factors},
        "rank": adapter.lora | {key: replace(factors, a=factors.a[:2], b=factors.b[:, :2])},
    }
    adapters = [replace(adapter, lora=lora) for lora in variants.values()]
    adapters += [
        adapter,
        replace(adapter, positions="all"),
        replace(adapter, base_fingerprint="f" * 16),
        replace(adapter, reft={0: reft}),
        replace(adapter, reft={1: reft}),
        replace(adapter, reft={1: replace(reft, scale=2.0)}),
        replace(adapter, reft={1: replace(reft, bias=frozen_array(np.ones(4)))}),
    ]
    assert len({revision_id_of(each) for each in adapters}) == len(adapters)
    assert revision_id_of(replace(adapter, num_file_bytes=1)) == revision_id_of(adapter)


def test_values_cannot_move_between_tensors(base):
    """Shapes are part of the digest: the same bytes cut elsewhere are another adapter."""
    values = np.arange(8, dtype=np.float32)

    def adapter(rank):
        a, b = values[: 2 * rank].reshape(rank, 2), values[2 * rank :].reshape(-1, rank)
        return Adapter(
            {(0, "q_proj"): LoraFactors(frozen_array(a), frozen_array(b), 1.0, "float32")}, {}, "prefill", "", 0
        )

    assert revision_id_of(adapter(1)) != revision_id_of(adapter(2))


def test_manifest_summary(base, limits, tmp_path):
    mixed = Manifest.of(read_adapter(write_random_mixed(tmp_path / "m", base, 3, layers=[0, 2]), base, limits))
    assert mixed.kinds == ("lora", "reft")
    assert mixed.layers == (0, 2)
    assert mixed.target_modules == ("down_proj", "q_proj")
    assert mixed.max_rank == 4
    assert mixed.num_parameters == 2 * (4 * (48 + 32) * 2 + 4 * (2 * 32 + 1))
    assert mixed.base_model == base.fingerprint
    reft = Manifest.of(read_adapter(write_random_reft(tmp_path / "r", base, 3, positions="all"), base, limits))
    assert (reft.kinds, reft.positions, reft.target_modules) == (("reft",), "all", ())
