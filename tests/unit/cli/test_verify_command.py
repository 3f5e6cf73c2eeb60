"""`prelude adapters verify`: exit codes, output for people and for programs."""

import json

import pytest
import yaml
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora
from support.commands import Prelude

from adapters.verification import self_check


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("adapters", "verify"))


@pytest.fixture
def lora(base, tmp_path):
    return write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj", "up_proj"], layers=[0, 2], rank=4)


def test_a_sound_adapter(verify, lora, model_dir):
    text = verify.prints(lora, "--model", model_dir)
    sizes = "rank 4 (at most 64), float32, layers 0, 2"
    for expected in ("loads here", "sha256:", sizes, "q_proj, up_proj", "of peft"):
        assert expected in text


def test_json(verify, lora, model_dir):
    found = verify.json(lora, "--model", model_dir, "--no-model")
    assert found["loads"] is True
    assert (found["kinds"], found["layers"], found["max_rank"]) == (["lora"], [0, 2], 4)
    assert set(found["bytes"]) == {"files", "disk", "host"}
    assert found["model"] is None


def test_the_limits_of_cluster_yaml_count(verify, lora, model_dir, tmp_path):
    config = tmp_path / "cluster.yaml"
    data = {
        "model": {"path": str(model_dir), "name": "demo", "dtype": "float32"},
        "workers": {"p": {"role": "prefill"}, "d": {"role": "decode"}},
        "adapter_limits": {"max_rank": 4},
    }
    config.write_text(yaml.safe_dump(data))
    assert "float32, scales folded in" in verify.prints(lora, "--config", config, "--no-model")
    config.write_text(yaml.safe_dump(data | {"adapter_limits": {"max_rank": 3}}))
    text = verify.refuses(lora, "--config", config, "--json", says="has rank 4")
    assert json.loads(text)["error"]["code"] == "adapter_incompatible"


def test_a_failed_check_is_a_refusal(verify, lora, model_dir, monkeypatch):
    monkeypatch.setitem(self_check.MODEL_TOLERANCE, "bfloat16", 0.0)
    monkeypatch.setattr(self_check, "_MODEL_TOLERANCE_ABSOLUTE", 0.0)
    text = verify.prints(lora, "--model", model_dir, status=1)
    assert "FAILS the self-check" in text
    assert "differ from the reference" in text


def test_a_zero_adapter_is_flagged(verify, base, model_dir, tmp_path):
    zero = write_random_lora(tmp_path / "zero", base, seed=1, zero=True)
    assert "changes nothing" in verify.prints(zero, "--model", model_dir, "--no-model")


def test_wrong_usage(verify, lora, tmp_path):
    assert verify(lora)[0] == 2
    assert verify(lora, "--model", tmp_path / "nowhere")[0] == 2
    assert verify(lora, "--config", tmp_path / "nowhere.yaml")[0] == 2
    assert verify()[0] == 2


def test_experts_are_checked_but_not_served(verify, moe_base, moe_dir, tmp_path):
    source = write_random_expert_lora(tmp_path / "lora", moe_base, 1, attention=["q_proj"], rank=4)
    text = verify.prints(source, "--model", moe_dir, status=1)
    for expected in (
        "is NOT SERVED",
        "not applied by engines without adapter_limits.max_expert_rank",
        "experts      rank 4",
        "experts.gate_proj, experts.up_proj, q_proj",
        "against the base model",
    ):
        assert expected in text
    found = verify.json(source, "--model", moe_dir, "--no-model", status=1)
    assert (found["loads"], found["problems"]) == (False, [])
    assert "not applied by engines" in found["not_served"]


def test_experts_are_served_up_to_their_limit(verify, moe_base, moe_dir, tmp_path):
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
        found[rank] = verify.json(source, "--config", config, "--no-model", status=int(rank == 3))
    assert (found[4]["loads"], found[4]["not_served"]) == (True, "")
    assert "rank 4 on experts, and workers take at most 3" in found[3]["not_served"]
    config.write_text(yaml.safe_dump(data | {"adapter_limits": {"max_expert_rank": 4}}))
    assert "experts      rank 4 (at most 4)" in verify.prints(source, "--config", config, "--no-model")


def test_attention_of_a_mixture_of_experts_loads(verify, moe_base, moe_dir, tmp_path):
    source = write_random_lora(tmp_path / "lora", moe_base, 1, modules=["q_proj", "o_proj"])
    found = verify.json(source, "--model", moe_dir)
    assert (found["loads"], found["not_served"]) == (True, "")
