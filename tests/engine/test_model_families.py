"""Every kind of adapter on every supported family of models, and on two tensor-parallel ranks.

`make test` has two ranks, with a family that has biases, and the family that differs most from Llama, in
`test_unified.py`: a text model within a multimodal one, with windows, scaled embeddings and norms of its own.
`test_experts.py` has mixtures of experts with room for LoRA on experts.
"""

import contextlib
import json
from pathlib import Path

import psutil
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.engines.attention_sinks import give_engines_sinks
from support.engines.model_families import make_family
from support.engines.running_engine import EXTRA_ARGUMENTS, AdapterSlots, engine_spec, running_engine
from support.engines.unified_engine import Unified, check, tokens

from adapters.model.base_model import BaseModel
from adapters.packed import PACKED_NAME
from engine.base_models import fitted_to


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen2", 2),
        ("gemma3_vl", 1),
        ("gpt_oss", 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("qwen2", 1),
                ("llama", 2),
                ("qwen3", 1),
                ("mistral", 1),
                ("qwen3_moe", 1),
                ("qwen3_vl", 1),
                ("qwen3_vl", 2),
                ("qwen3_vl_moe", 1),
                ("qwen3_vl_moe", 2),
                ("glm4", 1),
                ("glm4", 2),
                ("glm4_moe", 1),
                ("glm4_moe", 2),
                ("gemma3", 1),
                ("gemma3_vl", 2),
                ("gpt_oss", 1),
            )
        ),
    ],
    ids=lambda value: str(value),
)
def test_parity(tmp_path: Path, tmp_path_factory, monkeypatch: pytest.MonkeyPatch, family: str, ranks: int):
    model = tmp_path / "model"
    make_family(family, model)
    arguments: tuple[str, ...] = ()
    if family == "gpt_oss":
        arguments = give_engines_sinks(tmp_path, monkeypatch)
        config = json.loads((model / "config.json").read_text())  # with a dtype that is not the engine's
        (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
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
        extra_arguments=(*EXTRA_ARGUMENTS, *arguments),
    )
    with running_engine(fitted_to(spec, base), tmp_path / "cache") as engine:
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
