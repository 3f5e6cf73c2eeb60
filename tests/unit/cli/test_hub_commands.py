"""`prelude init --model OWNER/REPOSITORY` and `prelude adapters import NAME hf://…`, from a real server."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from support.adapters.random_adapters import write_random_lora
from support.adapters.tiny_model import TINY, write_model_config
from support.commands import Prelude
from support.http.hub import COMMIT, HubServer, serving

from adapters.model.base_model import BaseModel
from cluster.config.load import load_cluster_config
from cluster.local.demo import make_model

pytestmark = pytest.mark.slow

REPOSITORY = "some-one/Some.Thing-1"
HIDDEN, MLP, WORDS = 64, 128, 300


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with serving(HubServer(REPOSITORY, {}), monkeypatch, tmp_path / "hub-cache") as server:
        yield server


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Init(Prelude):
    def __call__(self, *words: object) -> tuple[int, str, str]:
        Path("cluster.yaml").unlink(missing_ok=True)  # of an earlier one
        return super().__call__(*words)


@pytest.fixture
def init(capsys: pytest.CaptureFixture[str]) -> Init:
    return Init(capsys, ("init", "--gpus", "0", "--model"))


def test_a_model_by_its_id(hub: HubServer, tmp_path: Path, init: Init):
    make_model(tmp_path / "made")
    hub.files = contents(tmp_path / "made") | {"pytorch_model.bin": b"\x80", "modeling.py": b"import os"}
    hub.files["consolidated.safetensors"] = b"as Mistral has them"
    assert init(f"{REPOSITORY}@main")[0] == 0
    model = load_cluster_config(Path("cluster.yaml")).model
    assert model.name == "Some.Thing-1"
    assert model.path.name == COMMIT
    assert contents(model.path) == contents(tmp_path / "made")
    assert "weights are" in Path("cluster.yaml").read_text()
    # Another start asks for no file again.
    hub.served.clear()
    assert init(REPOSITORY)[0] == 0
    assert not [each for each in hub.served if each.startswith("GET")]


def test_weights_in_several_files(hub: HubServer, tmp_path: Path, init: Init):
    make_model(tmp_path / "made")
    whole = contents(tmp_path / "made")
    weights = whole.pop("model.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    hub.files = whole | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "part-1.safetensors": weights,
        "part-2.safetensors": weights,
        "other.safetensors": weights,
    }
    assert init(REPOSITORY)[0] == 0
    assert not any("other" in each for each in hub.served)
    del hub.files["part-2.safetensors"]
    init.refuses(REPOSITORY, says="it has no part-2.safetensors, which model.safetensors.index.json names")
    hub.commit = "a" * 40
    index["weight_map"]["b"] = "../../part-1.safetensors"
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.served.clear()
    assert init(REPOSITORY)[0] == 0
    assert not any(".." in each for each in hub.served)


def test_models_that_are_not_served_cost_no_download_of_weights(hub: HubServer, init: Init):
    hub.files = {"config.json": b'{"architectures": ["Strange"]}', "model.safetensors": b"w", "a.bin": b""}
    init.refuses(REPOSITORY, says="Strange", status=2)
    assert "GET model.safetensors" not in hub.served
    hub.commit = "a" * 40
    hub.files = {"config.json": json.dumps(TINY).encode(), "pytorch_model.bin": b"\x80"}
    init.refuses(REPOSITORY, says="pickled weights are not read")
    said = "there is no directory no-one/nothing here, and hf://no-one/nothing: the Hub has no such repo"
    init.refuses("no-one/nothing", says=said)


def write_gguf(path: Path, architecture: str = "llama") -> None:
    """A Llama of one layer with random weights, and a tokenizer of single bytes."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    writer.add_rope_dimension_count(HIDDEN // 4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = [chr(0x100 + each) for each in range(WORDS - 1)]
    writer.add_token_list([*words, words[0] + words[1]])
    writer.add_token_merges([f"{words[0]} {words[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (WORDS, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (MLP, HIDDEN),
        "blk.0.ffn_up": (MLP, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, MLP),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once(hub: HubServer, tmp_path: Path, init: Init, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    hub.files = {"tiny.gguf": (tmp_path / "tiny.gguf").read_bytes(), "README.md": b""}
    (tmp_path / "cache" / "prelude" / "models" / "partial-of-a-killed-one").mkdir(parents=True)
    status, _, errors = init(REPOSITORY)
    assert status == 0, errors
    assert "Converting tiny.gguf to bfloat16, once." in errors
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert init(REPOSITORY)[0] == 0
    model = load_cluster_config(Path("cluster.yaml")).model
    cache = tmp_path / "cache" / "prelude" / "models"
    assert (model.name, model.path.parent.parent) == ("tiny", cache)
    assert list(cache.iterdir()) == [model.path.parent]
    embedding = load_file(model.path / "model.safetensors")["model.embed_tokens.weight"]
    assert embedding.shape == (WORDS, HIDDEN)
    expected = np.random.default_rng(0).standard_normal((WORDS, HIDDEN), dtype=np.float32)
    assert np.allclose(embedding.float().numpy(), expected, rtol=0.01, atol=0.001)  # bfloat16 has 8 bits
    shutil.copy("tiny.gguf", "copy.gguf")
    for same in (REPOSITORY, f"{REPOSITORY}/tiny.gguf", "copy.gguf"):  # by its content
        status, _, errors = init(same)
        assert (status, "Converting" in errors) == (0, False)
        assert load_cluster_config(Path("cluster.yaml")).model.path == model.path
    hub.files["other.gguf"] = b"GGUF"
    init.refuses(REPOSITORY, says="it has other.gguf, tiny.gguf; name one of them")
    init.refuses(f"{REPOSITORY}/other.gguf", says="other.gguf cannot be converted: ", status=2)
    write_gguf(tmp_path / "strange.gguf", "strange")
    init.refuses("strange.gguf", says="strange.gguf cannot be converted: ", status=2)
    assert list(cache.iterdir()) == [model.path.parent]  # nothing half done stays
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")  # as of a user without one that may be written
    init.refuses("strange.gguf", says=("/proc/.cache/prelude/models cannot be made (", "XDG_CACHE_HOME"), status=2)


CLUSTER = """\
model: {path: model, name: demo}
workers:
  u: {role: unified}
adapter_limits: {max_rank: 4, max_bytes: 10000000}
"""


@pytest.fixture
def lora(hub: HubServer, tmp_path: Path) -> HubServer:
    """A repository with an adapter in a folder, and a cluster for it."""
    write_model_config(tmp_path / "model")
    Path("cluster.yaml").write_text(CLUSTER)
    write_random_lora(tmp_path / "lora", BaseModel.read(tmp_path / "model"), 1, rank=2)
    hub.files = {f"best/{name}": content for name, content in contents(tmp_path / "lora").items()}
    hub.files |= {"best/optimizer.pt": b"\x80", "best/train.py": b"import os"}
    return hub


@pytest.fixture
def adapters(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("adapters",))


def test_an_adapter_by_its_place(lora: HubServer, tmp_path: Path, adapters: Prelude, monkeypatch):
    from huggingface_hub import constants

    assert adapters("import", "local", "lora")[0] == 0
    shutil.rmtree(tmp_path / "lora")
    out = adapters.prints("import", "acme/legal", f"hf://{REPOSITORY}/best")
    lineage = f"lineage: downloaded from hf://{REPOSITORY}@{COMMIT}/best"
    assert lineage in out
    assert {each for each in lora.served if each.startswith("GET")} == {
        "GET best/adapter_config.json",
        "GET best/adapter_model.safetensors",
    }
    assert lineage in adapters("show", "acme/legal")[1]
    assert re.findall("sha256:[0-9a-f]{64}", out)[0] in adapters("show", "local")[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert adapters("import", "again", f"hf://{REPOSITORY}/best")[0] == 0
    status, _, errors = adapters("import", "again", f"hf://{REPOSITORY}")
    assert (status, "hub_failed: " in errors, "this is no adapter" in errors) == (1, True, True)
    assert adapters("import", "again", "hf://nothing")[0] == 2


def test_adapters_that_are_not_taken(lora: HubServer, adapters: Prelude):
    lora.sizes["best/adapter_model.safetensors"] = 200_000_000
    adapters.refuses("import", "a", f"hf://{REPOSITORY}/best", says="adapter_too_large: ")
    assert not [each for each in lora.served if each.startswith("GET")]
    lora.sizes.clear()
    lora.commit = "a" * 40
    config = json.loads(lora.files["best/adapter_config.json"])
    lora.files["best/adapter_config.json"] = json.dumps(config).encode() + b" " * 2**20
    status, _, errors = adapters("import", "a", f"hf://{REPOSITORY}/best")
    assert (status, "prelude-work-" in errors) == (1, False)
    lora.files["best/adapter_model.bin"] = lora.files.pop("best/adapter_model.safetensors")
    adapters.refuses("import", "a", f"hf://{REPOSITORY}/best", says="pickled weights are not read")


def test_other_commands_take_a_model_by_its_id(hub: HubServer, tmp_path: Path, prelude: Prelude):
    make_model(tmp_path / "made")
    hub.files = contents(tmp_path / "made")
    write_random_lora(tmp_path / "lora", BaseModel.read(tmp_path / "made"), seed=1, rank=2)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Tell me about the sea.", "completion": " The sea is blue."}\n')
    trained = ("--data", "rows.jsonl", "--output")
    verify = ("adapters", "verify", "lora", "--no-model")
    train, evaluate = ("train", "sft", *trained, "run", "--max-steps", 1), ("train", "eval", "--data", "rows.jsonl")
    for words in (verify, train, evaluate):
        prelude.prints(*words, "--model", REPOSITORY)
    for words in (verify, train, evaluate, ("adapters", "convert", "lora", *trained, "converted")):
        said = "there is no directory some-one/else here, and hf://some-one/else: the Hub has no"
        prelude.refuses(*words, "--model", "some-one/else", says=said)
    assert prelude.json(*verify, "--model", "some-one/else", status=1)["loads"] is False
