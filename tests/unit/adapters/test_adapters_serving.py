import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file

from adapters.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_module
from adapters.errors import AdapterIncompatible
from adapters.formats import read_adapter
from adapters.manifest import revision_id_of
from adapters.normal_form import frozen_array
from adapters.random_adapters import all_modules, write_random_lora, write_random_mixed, write_random_reft
from adapters.serving import REFT_PREFIX, write_for_engine

CASES = {
    "all": {},
    "q alone": {"modules": ["q_proj"]},
    "k alone": {"modules": ["k_proj"]},
    "v alone": {"modules": ["v_proj"]},
    "gate alone": {"modules": ["gate_proj"]},
    "up alone": {"modules": ["up_proj"]},
    "o and down": {"modules": ["o_proj", "down_proj"]},
    "several ranks": {"rank_pattern": {"q_proj": 2, "up_proj": 13}},
    "some layers": {"modules": ["v_proj", "up_proj"], "layers": [1]},
    "fused": {"modules": all_modules(fused=True)},
    "rsLoRA": {"use_rslora": True, "alpha": -3},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_sglang_stacks_is_whole_and_computes_the_same(name, dtype, base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1, **CASES[name]), base, limits)
    write_for_engine(adapter, base, dtype, tmp_path / "engine")
    config = json.loads((tmp_path / "engine" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == adapter.max_rank
    assert (config["peft_type"], config["bias"]) == ("LORA", "none")
    tensors = load_file(tmp_path / "engine" / "adapter_model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    tolerance = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}[dtype]
    touched = {}
    for layer, module in adapter.lora:
        touched.setdefault(layer, set()).add(module)
    expected_tensors = 0
    for layer, modules in touched.items():
        for parts in (*FUSED_MODULES.values(), ("o_proj",), ("down_proj",)):
            if not modules & set(parts):
                continue
            for part in parts:  # a stack is whole or absent
                key = f"base_model.model.{name_of_module(layer, part)}"
                a, b = (tensors[f"{key}.lora_{factor}.weight"].double().numpy() for factor in "AB")
                assert (b.shape[0], a.shape[1]) == base.shape_of(part)
                assert a.shape[0] == b.shape[1] == config["r"]
                assert part in config["target_modules"]
                expected_tensors += 2
                if part not in modules:
                    assert not a.any()
                    assert not b.any()
                    continue
                factors = adapter.lora[layer, part]
                wanted = factors.scale * (factors.b.astype(np.float64) @ factors.a)
                assert np.abs(b @ a - wanted).max() <= tolerance * np.abs(wanted).max()
                assert not a[factors.rank :].any()
                assert not b[:, factors.rank :].any()
    assert len(tensors) == expected_tensors
    assert set(config["target_modules"]) <= set(MODULES)


def test_peft_and_we_read_it_back(base, limits, model, tmp_path):
    from adapters.reference import peft_adapted

    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj"], rank=4), base, limits)
    write_for_engine(adapter, base, "float32", tmp_path / "engine")
    back = read_adapter(tmp_path / "engine", base, limits)
    assert {module for _, module in back.lora} == {"q_proj", "k_proj", "v_proj"}
    assert all(factors.scale == 1 for factors in back.lora.values())
    with peft_adapted(model, tmp_path / "engine") as peft_model:
        assert peft_model is not None


def test_zero_stays_exactly_zero(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1, zero=True, alpha=-8), base, limits)
    write_for_engine(adapter, base, "bfloat16", tmp_path / "engine")
    for name, tensor in load_file(tmp_path / "engine" / "adapter_model.safetensors").items():
        if "lora_B" in name:
            assert not tensor.view(dtype=__import__("torch").int16).any()  # +0.0, not -0.0


def test_positions_are_kept(base, limits, tmp_path):
    source = write_random_lora(tmp_path / "lora", base, seed=1, config={"prelude": {"positions": "all"}})
    write_for_engine(read_adapter(source, base, limits), base, "float32", tmp_path / "engine")
    assert read_adapter(tmp_path / "engine", base, limits).positions == "all"


def test_reft_is_written_with_its_scale_folded_in(base, limits, tmp_path):
    for write in (write_random_reft, write_random_mixed):
        adapter = read_adapter(write(tmp_path / write.__name__, base, 1), base, limits)
        write_for_engine(adapter, base, "float32", tmp_path / f"{write.__name__}-engine")
        tensors = load_file(tmp_path / f"{write.__name__}-engine" / "adapter_model.safetensors")
        reft = {name: tensor.numpy() for name, tensor in tensors.items() if name.startswith(REFT_PREFIX)}
        assert len(reft) == 3 * len(adapter.reft)
        assert bool(adapter.lora) == any("lora_A" in name for name in tensors)
        for layer, factors in adapter.reft.items():
            np.testing.assert_array_equal(reft[f"{REFT_PREFIX}{layer}.a"], factors.a)
            np.testing.assert_array_equal(reft[f"{REFT_PREFIX}{layer}.bias"], factors.bias)
            np.testing.assert_allclose(reft[f"{REFT_PREFIX}{layer}.b"], factors.b * factors.scale, rtol=1e-6)


def test_another_base_model_is_refused(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1), base, limits)
    fields = {name: getattr(base, name) for name in base.__dataclass_fields__}
    with pytest.raises(AdapterIncompatible, match=base.fingerprint):
        write_for_engine(adapter, BaseModel(**fields | {"vocabulary": 99}), "float32", tmp_path / "engine")


def test_values_too_large_for_float16(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1, alpha=8e6), base, limits)
    with pytest.raises(AdapterIncompatible, match="too large for float16"):
        write_for_engine(adapter, base, "float16", tmp_path / "engine")
    assert list(tmp_path.iterdir()) == [tmp_path / "lora"]
    write_for_engine(adapter, base, "bfloat16", tmp_path / "engine")


def test_values_too_large_for_the_dtype_once_scaled(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj"]), base, limits)
    (key, factors), *_ = adapter.lora.items()
    for dtype in ("float32", "bfloat16"):
        huge = replace(
            adapter, lora={key: replace(factors, b=frozen_array(np.full_like(factors.b, 3.4e38)), scale=2.0)}
        )
        with pytest.raises(AdapterIncompatible, match="too large for"):
            write_for_engine(huge, base, dtype, tmp_path / "engine")
    # 3.4e38 is a float32 but rounds to infinity as a bfloat16.
    edge = replace(adapter, lora={key: replace(factors, b=frozen_array(np.full_like(factors.b, 3.4e38)), scale=1.0)})
    write_for_engine(edge, base, "float32", tmp_path / "engine32")
    with pytest.raises(AdapterIncompatible, match="too large for bfloat16"):
        write_for_engine(edge, base, "bfloat16", tmp_path / "engine16")


def test_a_directory_is_reused_replaced_and_never_half_written(base, limits, tmp_path, monkeypatch):
    first = read_adapter(write_random_lora(tmp_path / "a", base, seed=1), base, limits)
    second = read_adapter(write_random_lora(tmp_path / "b", base, seed=2), base, limits)
    target = tmp_path / "cache" / "engine"
    write_for_engine(first, base, "float32", target)
    written = (target / "adapter_model.safetensors").stat()
    write_for_engine(first, base, "float32", target)
    assert (target / "adapter_model.safetensors").stat().st_ino == written.st_ino
    write_for_engine(second, base, "float32", target)
    assert json.loads((target / "adapter_config.json").read_text())["prelude"]["revision_id"] == revision_id_of(second)
    write_for_engine(second, base, "bfloat16", target)
    assert json.loads((target / "adapter_config.json").read_text())["prelude"]["dtype"] == "bfloat16"
    (target / "adapter_config.json").write_text("{")
    write_for_engine(second, base, "bfloat16", target)
    monkeypatch.setattr("adapters.serving.write_safetensors", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_for_engine(first, base, "float32", target)
    assert json.loads((target / "adapter_config.json").read_text())["prelude"]["revision_id"] == revision_id_of(second)
    assert [path.name for path in target.parent.iterdir()] == ["engine"]


def test_writers_at_the_same_time(base, limits, tmp_path):
    adapter = read_adapter(write_random_lora(tmp_path / "lora", base, seed=1), base, limits)
    failures = []

    def write():
        try:
            write_for_engine(adapter, base, "float32", tmp_path / "engine")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(read_adapter(tmp_path / "engine", base, limits).lora) == 21
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "lora"]
