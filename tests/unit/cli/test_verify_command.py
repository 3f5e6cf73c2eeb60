"""`prelude adapters verify`: exit codes, output for people and for programs."""

import json

import pytest
import yaml
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora
from support.commands import run_command

from adapters.verification import self_check


def verify(capsys, *arguments: object) -> tuple[int, str, str]:
    return run_command(capsys, "adapters", "verify", *arguments)


@pytest.fixture
def lora(base, tmp_path):
    return write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj", "up_proj"], layers=[0, 2], rank=4)


def test_a_sound_adapter(capsys, lora, model_dir):
    code, text, _ = verify(capsys, lora, "--model", model_dir)
    assert code == 0
    sizes = "rank 4 (at most 64), float32, layers 0, 2"
    for expected in ("loads here", "sha256:", sizes, "q_proj, up_proj", "of peft"):
        assert expected in text


def test_json(capsys, lora, model_dir):
    code, text, _ = verify(capsys, lora, "--model", model_dir, "--json", "--no-model")
    found = json.loads(text)
    assert code == 0
    assert found["loads"] is True
    assert (found["kinds"], found["layers"], found["max_rank"]) == (["lora"], [0, 2], 4)
    assert set(found["bytes"]) == {"files", "disk", "host"}
    assert found["model"] is None


def test_the_limits_of_cluster_yaml_count(capsys, lora, model_dir, tmp_path):
    config = tmp_path / "cluster.yaml"
    data = {
        "model": {"path": str(model_dir), "name": "demo", "dtype": "float32"},
        "workers": {"p": {"role": "prefill"}, "d": {"role": "decode"}},
        "adapter_limits": {"max_rank": 4},
    }
    config.write_text(yaml.safe_dump(data))
    code, text, _ = verify(capsys, lora, "--config", config, "--no-model")
    assert code == 0
    assert "float32, scales folded in" in text
    config.write_text(yaml.safe_dump(data | {"adapter_limits": {"max_rank": 3}}))
    code, text, errors = verify(capsys, lora, "--config", config, "--json")
    assert code == 1
    assert json.loads(text)["error"]["code"] == "adapter_incompatible"
    assert "has rank 4" in errors


def test_a_failed_check_is_a_refusal(capsys, lora, model_dir, monkeypatch):
    monkeypatch.setitem(self_check.MODEL_TOLERANCE, "bfloat16", 0.0)
    monkeypatch.setattr(self_check, "_MODEL_TOLERANCE_ABSOLUTE", 0.0)
    code, text, _ = verify(capsys, lora, "--model", model_dir)
    assert code == 1
    assert "FAILS the self-check" in text
    assert "differ from the reference" in text


def test_a_zero_adapter_is_flagged(capsys, base, model_dir, tmp_path):
    zero = write_random_lora(tmp_path / "zero", base, seed=1, zero=True)
    code, text, _ = verify(capsys, zero, "--model", model_dir, "--no-model")
    assert code == 0
    assert "changes nothing" in text


def test_wrong_usage(capsys, lora, tmp_path):
    assert verify(capsys, lora)[0] == 2
    assert verify(capsys, lora, "--model", tmp_path / "nowhere")[0] == 2
    assert verify(capsys, lora, "--config", tmp_path / "nowhere.yaml")[0] == 2
    assert verify(capsys)[0] == 2


def test_experts_are_checked_but_not_served(capsys, moe_base, moe_dir, tmp_path):
    source = write_random_expert_lora(tmp_path / "lora", moe_base, 1, attention=["q_proj"], rank=4)
    code, text, _ = verify(capsys, source, "--model", moe_dir)
    assert code == 1
    for expected in (
        "is NOT SERVED",
        "not applied by engines without adapter_limits.max_expert_rank",
        "experts      rank 4",
        "experts.gate_proj, experts.up_proj, q_proj",
        "against the base model",
    ):
        assert expected in text
    code, text, _ = verify(capsys, source, "--model", moe_dir, "--json", "--no-model")
    found = json.loads(text)
    assert (code, found["loads"], found["problems"]) == (1, False, [])
    assert "not applied by engines" in found["not_served"]


def test_experts_are_served_up_to_their_limit(capsys, moe_base, moe_dir, tmp_path):
    source = write_random_expert_lora(tmp_path / "lora", moe_base, 1, attention=["q_proj"], rank=4)
    config = tmp_path / "cluster.yaml"
    data = {
        "model": {"path": str(moe_dir), "name": "m"},
        "engine": {"device": "cpu"},
        "workers": {"u": {"role": "unified"}},
    }
    found = {}
    for rank in (4, 3):
        config.write_text(yaml.safe_dump(data | {"adapter_limits": {"max_expert_rank": rank}}))
        code, text, _ = verify(capsys, source, "--config", config, "--json", "--no-model")
        found[rank] = json.loads(text)
        assert code == (rank == 3)
    assert (found[4]["loads"], found[4]["not_served"]) == (True, "")
    assert "rank 4 on experts, and workers take at most 3" in found[3]["not_served"]
    config.write_text(yaml.safe_dump(data | {"adapter_limits": {"max_expert_rank": 4}}))
    _, text, _ = verify(capsys, source, "--config", config, "--no-model")
    assert "experts      rank 4 (at most 4)" in text


def test_attention_of_a_mixture_of_experts_loads(capsys, moe_base, moe_dir, tmp_path):
    source = write_random_lora(tmp_path / "lora", moe_base, 1, modules=["q_proj", "o_proj"])
    code, text, _ = verify(capsys, source, "--model", moe_dir, "--json")
    found = json.loads(text)
    assert (code, found["loads"], found["not_served"]) == (0, True, "")
