"""Speed of training: shared prompts against pairs, and prefill-only SFT against peft's LoRA.

DPO steps on the length profiles of published data sets. "shared" reads each prompt once, in packed rows; "paired" reads
it with each answer, in packed rows too, by FlashAttention on GPUs; "padded" reads pairs in padded batches. Rows of a
layout are full, as most of a large batch are; its last rows, which are not, are left out. Rows hold different pairs in
each layout, so pairs/s is tokens/s by the mean tokens of a pair in the layout. Layouts take turns, every
second time in reverse order, so that drift of the machine's speed affects all alike.

On GPUs time is wall-clock time. On CPUs it is CPU time of one thread, so that busy neighbours matter little.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.model.base_model import BaseModel
from bench.errors import BenchError, WrongAnswer
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.systems.models import MODELS
from bench.training import attention_check, layouts
from bench.training.profiles import PROFILES, Pair, draw_pairs, median_ratio
from bench.training.readers import reader
from training.loop.objectives import Dpo, Objective, Sft
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec

_SMALL_MODEL = "small"
_SMALL = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 1024,
    "max_position_embeddings": 32768,
}
_LAYOUTS = {"shared": layouts.shared, "paired": layouts.paired, "padded": layouts.padded, "sft": layouts.answers}
_LAYOUTS["sft-peft"] = layouts.answers
_SFT_PROFILE = "capybara"
_LONG_ROW = "long-row"


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    device: str = "cpu"
    model: str = _SMALL_MODEL  # or a key of bench.systems.models.MODELS
    profiles: tuple[str, ...] = tuple(PROFILES)
    layouts: tuple[str, ...] = ("shared", "paired", "padded")
    row_tokens: int = 4096
    num_rows: int = 1  # that one measurement reads
    repeats: int = 3
    rank: int = 16  # of LoRA on all projections
    checkpointing: bool = False
    sft: bool = True
    long_row: int | None = None  # tokens of one more row, read once to see whether it fits
    check: bool = True  # FlexAttention against scaled-dot-product attention first
    limit_s: float = 3600.0  # what does not begin before is left out


GPU = Options("cuda", "llama-3.1-8b", row_tokens=8192, num_rows=2, checkpointing=True, long_row=16384)
QUICK = Options(profiles=("capybara",), row_tokens=1024, num_rows=1, repeats=1)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print a line for each measurement and the ratios, write the numbers. Raises BenchError."""
    begin = time.monotonic()
    require_folders(json_path)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("there is no GPU that torch can use; --device cpu works")
    if options.model not in (_SMALL_MODEL, *MODELS):
        raise BenchError(f"there is no model {options.model}; there are {', '.join((_SMALL_MODEL, *MODELS))}")
    if unknown := set(options.profiles) - set(PROFILES):
        raise BenchError(f"there is no profile {', '.join(sorted(unknown))}; there are {', '.join(PROFILES)}")
    if unknown := set(options.layouts) - set(_LAYOUTS):
        raise BenchError(f"there is no layout {', '.join(sorted(unknown))}; there are {', '.join(Options().layouts)}")
    checks: list[dict[str, Any]] = []
    if options.device == "cuda" and options.check:
        checks = list(attention_check.check(attention_check.CASES, attention_check.LENGTHS, progress))
        if wrong := [each for each in checks if not each["passes"]]:
            raise WrongAnswer(f"FlexAttention computes something else: {wrong[0]}")
        torch.compiler.reset()  # the measured rows have one length, as in training; kernels for any are slower
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        **provenance.head("training", command, asdict(options), options.device),
        "attention_checks": checks,
        "rows": rows,
    }
    threads = torch.get_num_threads()
    if options.device == "cpu":
        torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            model, base = make_model(options, Path(folder))
        adapter = TrainableAdapter.create(AdapterSpec("lora", rank=options.rank), base).to(options.device)
        for row in _measure_all(options, model, adapter, begin):
            rows.append(row)
            progress(json.dumps(row))
    finally:
        torch.set_num_threads(threads)
    document["ratios"] = ratios(rows)
    progress(table(document["ratios"]))
    write_json(document, json_path)
    return document


def make_model(options: Options, folder: Path) -> tuple[Any, BaseModel]:
    """A model with random weights, on the device, and its sizes. `folder` gets its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(_SMALL if options.model == _SMALL_MODEL else MODELS[options.model].config or {})
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, bos_token_id=None, eos_token_id=None)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return model, BaseModel.read(folder)


def _measure_all(options: Options, model: Any, adapter: TrainableAdapter, begin: float) -> Iterator[dict[str, Any]]:
    plan: list[tuple[str, str, tuple[str, ...], Objective]] = [
        ("dpo", name, options.layouts, Dpo()) for name in options.profiles
    ]
    if options.sft:
        plan.insert(1, ("sft", _SFT_PROFILE, ("sft", "sft-peft"), Sft()))
    for loss, name, chosen, objective in plan:
        pairs = _pairs_of(name, options, adapter.base.vocabulary)
        prepared = {layout: _LAYOUTS[layout](pairs, options.row_tokens)[: options.num_rows] for layout in chosen}
        sizes = {layout: layouts.tokens_per_example(layout, pairs) for layout in chosen}
        for repeat in range(-1, options.repeats):  # -1: warm-up
            for layout in reversed(chosen) if repeat % 2 else chosen:
                if time.monotonic() - begin > options.limit_s:
                    return
                rows = prepared[layout] if repeat >= 0 else prepared[layout][:1]
                measured = _measure(options, model, adapter, layout, rows, objective)
                measured["examples_per_s"] = round(measured["tokens_per_s"] / sizes[layout], 4)
                if repeat >= 0:
                    ratio = round(median_ratio(pairs), 2)
                    yield {
                        "loss": loss, "profile": name, "prompt_to_answer": ratio, "layout": layout, "repeat": repeat,
                        **measured,
                    }  # fmt: skip
    if options.long_row:
        torch.compiler.reset()
        yield from _long_row(options, model, adapter)


def _pairs_of(name: str, options: Options, vocabulary: int) -> list[Pair]:
    """So many that every layout has more than `num_rows` full rows."""
    profile = PROFILES[name]
    wanted = 2 * (options.num_rows + 1) * options.row_tokens
    return draw_pairs(profile, int(wanted / profile.overall) + 4, 0, vocabulary, options.row_tokens)


def _measure(
    options: Options,
    model: Any,
    adapter: TrainableAdapter,
    layout: str,
    rows: Sequence[layouts.FilledRow],
    objective: Objective,
) -> dict[str, Any]:
    """Losses and gradients of these rows, accumulated as in one step."""
    is_gpu = options.device == "cuda"
    with reader(layout, model, adapter, options.checkpointing) as found:
        if is_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = _now_s(options.device)
        for each in rows:
            objective(found, each.row).total.backward()
        if is_gpu:
            torch.cuda.synchronize()
        duration_s = _now_s(options.device) - begin
    num_tokens = sum(each.num_tokens for each in rows)
    return {
        "tokens": num_tokens,
        "filled": round(num_tokens / sum(each.row.num_tokens for each in rows), 3),
        "duration_s": round(duration_s, 4),
        "tokens_per_s": round(num_tokens / duration_s, 1),
        "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
    }


def _long_row(options: Options, model: Any, adapter: TrainableAdapter) -> Iterator[dict[str, Any]]:
    """One pair that fills the row: three quarters are prompt."""
    assert options.long_row is not None
    eighth = options.long_row // 8
    tokens = tuple(range(1, 1 + eighth * 6))
    pair = Pair(tokens, tokens[:eighth], tokens[1 : eighth + 1])
    for loss, layout, objective in (("dpo", "shared", Dpo()), ("sft", "sft", Sft())):
        rows = _LAYOUTS[layout]([pair], options.long_row)
        for repeat in range(2):
            measured = _measure(options, model, adapter, layout, rows, objective)
            yield {
                "loss": loss,
                "profile": _LONG_ROW,
                "prompt_to_answer": 6,
                "layout": layout,
                "repeat": repeat,
                **measured,
            }


def _now_s(device: str) -> float:
    return time.process_time() if device == "cpu" else time.perf_counter()


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each profile, medians, and the medians of the repeats' ratios."""
    found = []
    for loss, of, others, unit in (
        ("dpo", "shared", ("paired", "padded"), "examples_per_s"),
        ("sft", "sft", ("sft-peft",), "tokens_per_s"),
    ):
        for profile in dict.fromkeys(
            row["profile"] for row in rows if row["loss"] == loss and row["profile"] != _LONG_ROW
        ):
            rates = {
                (row["layout"], row["repeat"]): row[unit]
                for row in rows
                if (row["loss"], row["profile"]) == (loss, profile)
            }
            line: dict[str, Any] = {"loss": loss, "profile": profile}
            line["prompt_to_answer"] = next(row["prompt_to_answer"] for row in rows if row["profile"] == profile)
            for layout in (of, *others):
                if values := [rate for (each, _), rate in rates.items() if each == layout]:
                    line[layout] = round(statistics.median(values), 2)
            for other in others:
                both = [rates[of, n] / rate for (each, n), rate in rates.items() if each == other and (of, n) in rates]
                if both:
                    line[f"{of}/{other}"] = round(statistics.median(both), 3)
            found.append(line)
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Pairs/s of DPO and tokens/s of SFT, medians, and their ratios."""
    texts = []
    for line in lines:
        unit = "pairs/s" if line["loss"] == "dpo" else "tokens/s"
        values = ", ".join(
            f"{name} {value:.2f}" for name, value in line.items() if name not in ("loss", "profile", "prompt_to_answer")
        )
        texts.append(
            f"{line['loss']} {line['profile']:14} prompt:answer {line['prompt_to_answer']:5}  {unit}: {values}"
        )
    return "\n".join(texts)
