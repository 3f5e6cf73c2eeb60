"""Every kind of adapter on every supported family of models, and on two tensor-parallel ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from adapters.base_model import BaseModel
from adapters.packed import PACKED_NAME
from adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from cluster.demo import make_model
from tests.engine.running_engine import AdapterSlots, engine_spec, running_engine
from tests.engine.test_unified import Unified, check, tokens

SIZES = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def make_family(name: str, folder: Path) -> None:
    """A small model of one family with random weights, and the demo's tokenizer."""
    import torch
    import transformers

    make_model(folder, hidden=64, num_layers=3)
    if name == "llama":
        return
    make = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
            # Heads of 64: on a GPU SGLang 0.5.17's kernel for this family has no narrower ones.
            {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
             "norm_topk_prob": True},
        ),
        "mixtral": (
            transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4, "head_dim": 16},
        ),
    }  # fmt: skip
    config_type, model_type, extra = make[name]
    torch.manual_seed(1)
    model = model_type(config_type(**SIZES, eos_token_id=0, bos_token_id=None, pad_token_id=0, **extra))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms that are not trivial
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("qwen2", 1), ("qwen3", 1), ("mistral", 1), ("llama", 2), ("qwen3_moe", 1), ("qwen3_moe", 2), ("mixtral", 1)],
    ids=lambda value: str(value),
)
def test_parity(tmp_path: Path, tmp_path_factory, family: str, ranks: int):
    model = tmp_path / "model"
    make_family(family, model)
    base = BaseModel.read(model)
    modules, mixed = base.slot_modules(), base.slot_modules(("q_proj", "down_proj"))
    everywhere = {"prelude": {"positions": "all"}}
    directories = {
        "lora": write_random_lora(tmp_path / "lora", base, 1, modules=modules),
        "direft": write_random_reft(tmp_path / "direft", base, 2, rank=8),
        "mixed": write_random_mixed(tmp_path / "mixed", base, 3, modules=mixed),
        "everywhere": write_random_lora(tmp_path / "everywhere", base, 4, modules=modules, config=everywhere),
    }
    spec = engine_spec(
        "unified",
        model,
        tmp_path_factory.mktemp("e") / "s",
        adapters=AdapterSlots(2, 16, modules),
        tensor_parallel=ranks,
    )
    with running_engine(spec, tmp_path / "cache") as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        unified = Unified(engine, directories, revisions, tmp_path)
        cases = unified.cases([(name, tokens(count, 7)) for name in (None, *directories) for count in (3, 150)])
        for case in cases:
            check(case, unified.ask(case))
        for case, answer in zip(cases, unified.ask_together(cases), strict=True):
            check(case, answer)
        mapped = mapped_files(spec.port, tmp_path / "cache")
        packed = {path.stat().st_ino for path in (tmp_path / "cache").glob(f"*/{PACKED_NAME}")}
        assert mapped == [packed] * ranks  # of the same files: no rank has copies of its own
        assert len(packed) == len(directories)


def mapped_files(port: int, folder: Path) -> list[set[int]]:
    """For each scheduler of the engine that listens there, the inodes of the files in a folder that it maps, shared."""
    [engine] = [each for each in psutil.process_iter() if is_engine(each, port)]
    schedulers = [each for each in engine.children(recursive=True) if "scheduler" in each.name() + str(each.cmdline())]
    found = []
    for scheduler in schedulers:
        lines = [line.split(maxsplit=5) for line in Path(f"/proc/{scheduler.pid}/maps").read_text().splitlines()]
        own = [line for line in lines if line[-1].startswith(f"{folder}/")]
        assert all(line[1].endswith("s") for line in own)
        found.append({int(line[4]) for line in own})
    return found


def is_engine(process: psutil.Process, port: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return "engine.launch" in process.cmdline() and str(port) in process.cmdline()
    return False
