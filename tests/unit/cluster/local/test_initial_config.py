"""`prelude init`: the numbers of a first cluster.yaml, worked out by hand for known models, and what does not fit."""

import json
import struct
import sys
from pathlib import Path

import pytest
from support.commands import Prelude
from support.engines.model_sizes import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B

from adapters.errors import BaseModelInvalid
from adapters.model.base_model import BaseModel
from cluster.agent.engine_spec import fitted_spec
from cluster.config.load import load_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from cluster.host_memory import GIB
from cluster.local import gpus as gpus_module
from cluster.local.initial_config import Host, Pools, initial_config
from cluster.local.memory_plan import ModelSizes

SMALL = {
    **LLAMA_8B, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "torch_dtype": "float32",
}  # fmt: skip
HOST_BYTES = {"free_bytes": 200 * GIB, "shared_bytes": 100 * GIB}
NO_GPU = Host(0, None, **HOST_BYTES)


def model_in(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(path: Path, *tensors: tuple[str, list[int]]) -> None:
    """A safetensors file that claims these tensors, without their bytes."""
    header = {
        f"t{number}": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for number, (dtype, shape) in enumerate(tensors)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def written(model: Path, host: Host, pools: Pools) -> tuple[str, ClusterConfig]:
    text = initial_config(model, ModelSizes.read(model), host, pools)
    path = model.parent / "cluster.yaml"
    path.write_text(text)
    config = load_cluster_config(path)
    for name in config.workers:
        fitted_spec(config, name, model.parent, BaseModel.read(model))
    assert max(map(len, text.splitlines())) <= 120
    return text, config


def test_the_numbers_of_an_8b_on_two_gpus(tmp_path: Path):
    model = model_in(tmp_path / "Llama 8B!", LLAMA_8B)
    text, config = written(model, Host(2, 141 * GIB, **HOST_BYTES), Pools.chosen(2, 1, False))
    parameters = 2 * 128256 * 4096 + 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    per_layer = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3 + 2 * 4096 + 1
    slots = 9 * 32 * 64 * per_layer * 2
    kv = 2 * 32 * 8 * 128 * 2
    usable = int(141 * GIB * 0.85)
    assert config.engine.max_total_tokens == (usable - 2 * parameters - slots) // kv
    assert config.engine_of("decode-0").max_total_tokens == (usable - 2 * parameters) // kv
    assert config.model.name == "Llama-8B-"
    assert (config.model.path, config.model.dtype) == (model.resolve(), "bfloat16")
    assert {name: worker.gpus for name, worker in config.workers.items()} == {"prefill-0": 1, "decode-0": 1}
    assert config.residency.host_bytes == 50 * GIB  # half of /dev/shm, a quarter of the memory
    for number in (f"= {kv} bytes", f"= {config.engine.max_total_tokens} tokens", "15.0 GiB of weights", "141.0 GiB"):
        assert number in text.replace("\n  # ", " ")


def test_what_lora_on_experts_would_take_is_said(tmp_path: Path):
    """Of Qwen3-30B-A3B: 48 layers, 128 experts, rank 16, 3 (2048 + 768) columns and rows, in 2 bytes."""
    text, config = written(model_in(tmp_path / "m", QWEN3_30B_A3B), NO_GPU, Pools.chosen(0, 1, True))
    assert "A rank of 16 adds 1.5 GiB to each slot." in text.replace("\n  # ", " ")
    assert config.adapter_limits.max_expert_rank == 0


def test_the_weights_are_counted_in_the_serving_dtype(tmp_path: Path):
    model = model_in(tmp_path / "m", {**SMALL, "torch_dtype": "bfloat16"})
    weights(model / "model-1.safetensors", ("F32", [10, 20]), ("BF16", [3]), ("F8_E4M3", [7]))
    weights(model / "model-2.safetensors", ("I32", [5]))
    weights(model / "consolidated.safetensors", ("F32", [1000]))
    assert ModelSizes.read(model).weight_bytes == 2 * 200 + 2 * 3 + 7 + 4 * 5
    index = {"weight_map": {"a": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelSizes.read(model).weight_bytes == 20


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, struct.pack("<Q", 4) + b"[[]]"])
def test_damaged_weights_are_named(damage: bytes, tmp_path: Path):
    model = model_in(tmp_path / "m", SMALL)
    (model / "model.safetensors").write_bytes(damage)
    with pytest.raises(BaseModelInvalid, match=r"model\.safetensors is not a safetensors file"):
        ModelSizes.read(model)
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BaseModelInvalid, match=r"index\.json cannot be read"):
        ModelSizes.read(model)


def test_what_does_not_fit_says_which_size_would(tmp_path: Path):
    model = model_in(tmp_path / "m", LLAMA_70B)
    host = Host(4, 80 * GIB, **HOST_BYTES)
    with pytest.raises(ConfigError) as caught:
        written(model, host, Pools.chosen(4, 1, True))
    for word in ("GPU of 80.0 GiB at tensor parallel size 1", "68.0 GiB usable - 131.4 GiB of weights", "parallel 4"):
        assert word in str(caught.value)
    _, config = written(model, host, Pools.chosen(4, 4, True))
    assert config.engine_of("unified-0").tensor_parallel == 4
    with pytest.raises(ConfigError, match="no tensor parallel size that divides its heads would fit"):
        written(model, Host(4, 8 * GIB, **HOST_BYTES), Pools.chosen(4, 1, True))
    with pytest.raises(ConfigError, match=r"2\.0 GiB usable .* per engine"):
        written(model, Host(0, None, free_bytes=8 * GIB, shared_bytes=GIB), Pools.chosen(0, 1, False))


@pytest.mark.parametrize(
    ("num_gpus", "tensor_parallel", "asked", "expected"),
    [
        (0, 1, (False,), (1, 1, 0)),
        (0, 1, (True,), (0, 0, 1)),
        (1, 1, (False,), (0, 0, 1)),
        (3, 1, (False,), (1, 2, 0)),
        (8, 2, (True,), (0, 0, 4)),
        (0, 1, (False, True), (1, 1, 1)),
        (2, 1, (False, True), (0, 0, 2)),  # too few for a pair and another worker
        (8, 2, (False, True), (1, 2, 1)),
        (8, 1, (True, True), (0, 0, 8)),
    ],
)
def test_the_workers(num_gpus: int, tensor_parallel: int, asked, expected, tmp_path: Path):
    pools = Pools.chosen(num_gpus, tensor_parallel, *asked)
    assert (pools.prefill, pools.decode, pools.unified) == expected
    host = Host(num_gpus, 80 * GIB if num_gpus else None, **HOST_BYTES)
    _, config = written(model_in(tmp_path / "m", SMALL), host, pools)
    found = tuple(len(config.workers_of(role)) for role in ("prefill", "decode", "unified"))
    assert found == expected
    assert {config.engine_of(name).tensor_parallel for name in config.workers} == {tensor_parallel}


def test_shared_memory_without_room_for_an_adapter_is_refused(tmp_path: Path):
    """As in a container, which has 64 MiB: `prelude up` would refuse the file, or requests with adapters fail."""
    model, pools = model_in(tmp_path / "m", LLAMA_8B), Pools.chosen(8, 1, False)
    with pytest.raises(ConfigError, match=r"is 88\.0 MiB, .* has 8\.0 MiB: half of .* divided by 4\. .*--shm-size"):
        written(model, Host(8, 80 * GIB, free_bytes=900 * GIB, shared_bytes=GIB // 16), pools)
    for shared_bytes in (GIB, 900 * GIB):
        _, config = written(model, Host(8, 80 * GIB, free_bytes=900 * GIB, shared_bytes=shared_bytes), pools)
        assert config.residency.host_bytes * pools.prefill <= shared_bytes // 2


def test_too_many_gpus_for_one_worker_are_refused():
    with pytest.raises(ConfigError, match="--tensor-parallel 2 needs as many GPUs, but there are 1"):
        Pools.chosen(1, 2, True)


def test_without_the_memory_of_the_gpus_sglang_takes_what_is_free(tmp_path: Path):
    _, config = written(model_in(tmp_path / "m", SMALL), Host(1, None, **HOST_BYTES), Pools(0, 0, 1, 1))
    assert config.engine.max_total_tokens is None


def test_the_command_never_overwrites(tmp_path: Path, prelude: Prelude):
    model, path = model_in(tmp_path / "m", SMALL), tmp_path / "cluster.yaml"
    path.write_text("mine")
    words = ("init", "--model", model, "--config", path, "--gpus", 0)
    prelude.refuses(*words, says=f"{path} exists; remove it, or name another file", status=2)
    assert path.read_text() == "mine"
    path.unlink()
    assert "prefill-0, decode-0. Next: prelude up --config" in prelude.prints(*words)
    assert load_cluster_config(path).engine.device == "cpu"
    assert set(tmp_path.iterdir()) == {model, path}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", 2], "--gpus asks for 2; this host has 1 (0). `prelude plan"),
        (["--gpus", -1], "no number from 0 on"),
        (["--gpus", 0, "--tensor-parallel", 2], "--tensor-parallel 2 divides a model among GPUs; there are none"),
        (["--lengths", "2048"], "'2048' is no tokens of prompts and answers; write them as 2048+128"),
        (["--config", "/nowhere/at/all.yaml"], "there is no folder /nowhere/at"),
        (["--model", "/nowhere"], "--model: /nowhere/config.json cannot be read"),
        (["--config", "/proc/cluster.yaml"], "/proc/cluster.yaml cannot be written: No such file or directory; name"),
    ],
)
def test_bad_arguments_are_refused(arguments, words: str, tmp_path: Path, prelude: Prelude, monkeypatch):
    listed = "print('0, GPU-aa, 81920, NVIDIA A')"
    one = gpus_module.list_gpus({}, (sys.executable, "-c", listed))
    monkeypatch.setattr(gpus_module, "list_gpus", lambda _environment: one)
    model, path = model_in(tmp_path / "m", SMALL), tmp_path / "cluster.yaml"
    prelude.refuses("init", "--model", model, "--config", path, *arguments, says=words, status=2)
    assert not path.exists()


def test_the_gpus_of_this_host_are_used(tmp_path: Path, prelude: Prelude, monkeypatch):
    listed = "print('0, GPU-aa, 81920, NVIDIA A\\n1, GPU-bb, 40960, NVIDIA B')"
    two = gpus_module.list_gpus({}, (sys.executable, "-c", listed))
    monkeypatch.setattr(gpus_module, "list_gpus", lambda _environment: two)
    path = tmp_path / "cluster.yaml"
    prelude.prints("init", "--model", model_in(tmp_path / "m", SMALL), "--config", path)
    config = load_cluster_config(path)
    assert list(config.workers) == ["prefill-0", "decode-0"]
    assert "85% of a GPU's 40.0 GiB" in path.read_text().replace("\n  # ", " ")


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ((), {"prefill": 3, "decode": 1}),  # measured: docs/evidence.md
        (("--lengths", "512+512"), {"unified": 4}),
        (("--lengths", "4096+16"), {"prefill": 3, "decode": 1}),  # one long prompt delays a short answer's tokens
        (("--with-all-positions",), {"prefill": 1, "decode": 2, "unified": 1}),  # three are too few to divide otherwise
        ((), {"prefill": 6, "decode": 2}),
        (("--lengths", "2048+400"), {"prefill": 4, "decode": 4}),
    ],
)
def test_workers_of_four_gpus_and_more_are_divided_by_lengths(
    options, roles: dict[str, int], tmp_path: Path, prelude: Prelude, monkeypatch
):
    host = Host(sum(roles.values()), 80 * GIB, 2048 * GIB, 1024 * GIB)
    monkeypatch.setattr("cli.init._host", lambda _arguments: host)
    path, model = tmp_path / "cluster.yaml", model_in(tmp_path / "m", LLAMA_8B)
    prelude.prints("init", "--model", model, "--config", path, *options)
    config = load_cluster_config(path)
    assert {role: len(config.workers_of(role)) for role in ("prefill", "decode", "unified")} == {
        "prefill": 0, "decode": 0, "unified": 0, **roles
    }  # fmt: skip
