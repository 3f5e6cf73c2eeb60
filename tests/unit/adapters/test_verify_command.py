"""`prelude adapters verify`: exit codes, output for people and for programs."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from adapters.random_adapters import write_random_lora
from cluster.cli import main
from cluster.commands import adapters_verify as command


@pytest.fixture(autouse=True)
def _leave_logging_alone(monkeypatch):
    monkeypatch.setattr(command, "silence_libraries", lambda: None)


def verify(capsys, *arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as ended:
        main(["adapters", "verify", *map(str, arguments)])
    output = capsys.readouterr()
    return ended.value.code, output.out, output.err


@pytest.fixture
def lora(base, tmp_path):
    return write_random_lora(tmp_path / "lora", base, seed=1, modules=["q_proj", "up_proj"], layers=[0, 2], rank=4)


def test_a_sound_adapter(capsys, lora, model_dir):
    code, text, _ = verify(capsys, lora, "--model", model_dir)
    assert code == 0
    for expected in (
        "loads here",
        "sha256:",
        "rank 4 (at most 64), float32, layers 0, 2",
        "q_proj, up_proj",
        "of peft",
    ):
        assert expected in text


def test_json(capsys, lora, model_dir):
    code, text, _ = verify(capsys, lora, "--model", model_dir, "--json", "--no-model")
    found = json.loads(text)
    assert code == 0
    assert found["loads"] is True
    assert (found["kinds"], found["layers"], found["max_rank"]) == (["lora"], [0, 2], 4)
    assert set(found["bytes"]) == {"files", "disk", "host", "slot", "all_slots"}
    assert found["model"] is None
    assert found["factors"]["largest_error"] <= found["factors"]["tolerance"]


def test_the_limits_of_cluster_yaml_count(capsys, lora, model_dir, tmp_path):
    config = tmp_path / "cluster.yaml"
    data = {
        "model": {"path": str(model_dir), "name": "demo", "dtype": "float32"},
        "workers": {"p": {"role": "prefill"}, "d": {"role": "decode"}},
        "adapter_limits": {"max_rank": 4, "slots": 3},
    }
    config.write_text(yaml.safe_dump(data))
    code, text, _ = verify(capsys, lora, "--config", config, "--no-model")
    assert code == 0
    assert "float32, scales folded in" in text
    assert "all 3 slots and one" in text
    config.write_text(yaml.safe_dump(data | {"adapter_limits": {"max_rank": 3}}))
    code, text, errors = verify(capsys, lora, "--config", config, "--json")
    assert code == 1
    assert json.loads(text)["error"]["code"] == "adapter_incompatible"
    assert "has rank 4" in errors


def test_a_failed_check_is_a_refusal(capsys, lora, model_dir, monkeypatch):
    monkeypatch.setitem(__import__("adapters.self_check").self_check.FACTOR_TOLERANCE, "bfloat16", 1e-9)
    code, text, _ = verify(capsys, lora, "--model", model_dir, "--no-model")
    assert code == 1
    assert "FAILS the self-check" in text
    assert "of the change away" in text


def test_a_zero_adapter_is_flagged(capsys, base, model_dir, tmp_path):
    zero = write_random_lora(tmp_path / "zero", base, seed=1, zero=True)
    code, text, _ = verify(capsys, zero, "--model", model_dir, "--no-model")
    assert code == 0
    assert "changes nothing" in text


def test_pickles_are_converted_only_when_asked(capsys, lora, model_dir, tmp_path):
    weights = lora / "adapter_model.safetensors"
    torch.save(load_file(weights), lora / "adapter_model.bin")
    weights.unlink()
    code, _, errors = verify(capsys, lora, "--model", model_dir)
    assert code == 1
    assert "adapter_unsupported" in errors
    converted = tmp_path / "converted"
    code, text, _ = verify(capsys, lora, "--model", model_dir, "--no-model", "--allow-pickle", converted)
    assert code == 0
    assert str(converted) in text
    code, _, errors = verify(capsys, lora, "--model", model_dir, "--allow-pickle", converted)
    assert code == 2
    assert "exists" in errors


def test_wrong_usage(capsys, lora, tmp_path):
    assert verify(capsys, lora)[0] == 2
    assert verify(capsys, lora, "--model", tmp_path / "nowhere")[0] == 2
    assert verify(capsys, lora, "--config", tmp_path / "nowhere.yaml")[0] == 2
    assert verify(capsys)[0] == 2
