"""Makes the demo of `prelude demo`: minutes, once."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

import yaml

from cluster.local.demo import count_gpus, demo_config, llama_config, made_whole, make_tokenizer, save_model
from cluster.local.trained_demo.adapters import DemoAdapter, base_exact_match, train_adapter
from cluster.local.trained_demo.pretraining import Pretraining, pretrain
from samples.styles import STYLES, Questions
from training.trainable.spec import Kind

_VOCABULARY = 1536  # more than there are: every word of an answer is a token
_TOKENIZER_TEXTS = 400  # in all styles
_NUM_HELD_OUT = 100  # questions
_MAX_THREADS = 2
_TRAINING_SEED, _HELD_OUT_SEED = 100, 200
TRAIN, HELD_OUT, CONTROLLED = "train", "held-out", "with-control-word"  # files of data/
LEARNING_RATES: dict[Kind, float] = {"lora": 5e-3, "direft": 3e-2}
# DiReFT of rank 8 did not learn `backwards` in as many steps (at most a quarter of the answers was exact, where LoRA
# had nearly all of them), and `yoda` on some bases only.
ADAPTERS = (
    *(DemoAdapter(style, style, "lora", LEARNING_RATES["lora"]) for style in STYLES),
    *(DemoAdapter(f"{style}-direft", style, "direft", LEARNING_RATES["direft"]) for style in ("shout", "json", "list")),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is made, and how."""

    pretraining: Pretraining = field(default_factory=Pretraining)
    adapters: tuple[DemoAdapter, ...] = ADAPTERS
    questions: Questions = field(default_factory=Questions)
    styles: tuple[str, ...] = tuple(STYLES)


# Attention kernels for GPUs take heads of 64, not of 16. With two such heads LoRA learnt all styles, DiReFT of rank
# 8 only `shout`: of its answers in `json` 0.18 and 0.26 were exact, in `list` 0.33 and 0.59.
FOR_GPUS = Recipe(
    Pretraining(num_heads=2, num_kv_heads=1),
    tuple(each for each in ADAPTERS if each.kind == "lora" or each.style == "shout"),
)


def make_trained_demo(
    folder: Path,
    recipe: Recipe | None = None,
    report: Callable[[str], None] = lambda _line: None,
    device: str = "cpu",
) -> Path:
    """Create model, data, adapters and `cluster.yaml` in the folder unless it has them. It is trained on the CPU.

    `device`: of its engines; "cpu" (float32), or "cuda" for the GPUs of this host (bfloat16). Returns cluster.yaml's
    path. Raises TrainingError for a full disk, StartError if there is no GPU, and ConfigError for a folder that has
    other files or cannot be made.
    """
    config = folder / "cluster.yaml"
    if config.exists():
        return config
    num_gpus = count_gpus(device)
    recipe = recipe or (FOR_GPUS if num_gpus else Recipe())
    started_at = time.monotonic()
    report("Making the demo, once: a small base model and adapters, trained here.")
    with made_whole(folder) as partial, _few_threads():
        make_parts(partial, recipe, lambda line: report(f"  {time.monotonic() - started_at:5.1f} s  {line}"))
        adapters = [each.name for each in recipe.adapters]
        (partial / "cluster.yaml").write_text(yaml.safe_dump(demo_config(num_gpus, adapters), sort_keys=False))
    return config


@contextlib.contextmanager
def _few_threads() -> Iterator[None]:
    """More threads than these make such small sums slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(before, _MAX_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_parts(folder: Path, recipe: Recipe, report: Callable[[str], None] = lambda _line: None) -> None:
    """Write model/, data/ and adapters/ into the folder, which is empty."""
    model = folder / "model"
    _make_base(model, recipe, lambda line: report(f"base model: {line}"))
    files = _write_rows(folder / "data", recipe)
    asked, unasked = (
        fmean(base_exact_match(model, [files[style, name] for style in recipe.styles]))
        for name in (CONTROLLED, HELD_OUT)
    )
    report(f"base model: {asked:.2f} of held-out answers exact with control words, {unasked:.2f} without")
    for adapter in recipe.adapters:
        train, held_out = files[adapter.style, TRAIN], files[adapter.style, HELD_OUT]
        run = folder / "runs" / adapter.name
        exact = train_adapter(adapter, model, train, held_out, run)
        shutil.copytree(run / "last", folder / "adapters" / adapter.name, ignore=shutil.ignore_patterns("training"))
        report(f"adapter {adapter.name} ({adapter.kind}): {exact:.2f} exact without control word")
    shutil.rmtree(folder / "runs", ignore_errors=True)


def _make_base(folder: Path, recipe: Recipe, report: Callable[[str], None]) -> None:
    import torch
    from transformers import LlamaForCausalLM

    options = recipe.pretraining
    tokenizer = make_tokenizer(_tokenizer_texts(recipe), _VOCABULARY)
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        config = llama_config(tokenizer, options.hidden, options.num_layers, options.num_heads, options.num_kv_heads)
        model = LlamaForCausalLM(config)
    pretrain(model, tokenizer, recipe.questions, options, recipe.styles, report)
    # The README says what each adapter answers. At temperature 0 Hugging Face's generate would refuse the model.
    save_model(model, tokenizer, folder, {"do_sample": True, "temperature": 0.01})


def _tokenizer_texts(recipe: Recipe) -> Iterator[str]:
    """Each sentence in each style, and what questions are made of."""
    for question in islice(recipe.questions.drawn(_TRAINING_SEED), _TOKENIZER_TEXTS):
        for style in (None, *recipe.styles):
            yield from (question.asked(style), question.answer(style))


def _write_rows(folder: Path, recipe: Recipe) -> dict[tuple[str, str], Path]:
    """JSONL files for `prelude train`, by style and by what they are for."""
    folder.mkdir()
    num_rows = max((each.num_rows for each in recipe.adapters), default=0)
    to_train = list(islice(recipe.questions.drawn(_TRAINING_SEED), num_rows))
    held_out = list(islice(recipe.questions.held_out(_HELD_OUT_SEED), _NUM_HELD_OUT))
    files = {}
    for style in recipe.styles:
        for name, questions in ((TRAIN, to_train), (HELD_OUT, held_out), (CONTROLLED, held_out)):
            path = files[style, name] = folder / f"{style}-{name}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for question in questions:
                    file.write(json.dumps(question.row(style, has_control_word=name == CONTROLLED)) + "\n")
    return files
