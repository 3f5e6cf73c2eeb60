"""Tables of what adapters cost, on one H200 and on two CPU cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.evidence.cells import (
    GPU_COUNTS,
    columns,
    fixed,
    latency_ratios,
    markdown,
    rates,
    rates_and_ratios,
    ratios,
    result,
    texts,
)
from bench.measuring.report import Ratio, mixed
from bench.measuring.result_file import ResultFile

_LLAMA = result("adapter-tax-h200-llama-3.1-8b-rank16-unified.json")
_LLAMA_STOCK = result("adapter-tax-h200-llama-3.1-8b-rank16-stock.json")
_LLAMA_REPEATED = result("adapter-tax-h200-llama-3.1-8b-rank16-two-repeats.json")
_LLAMA_STOCK_REPEATED = result("adapter-tax-h200-llama-3.1-8b-rank16-stock-two-repeats.json")
_REPEATED_COUNTS = (1, 32, 512)
_LLAMA_BEFORE = result("adapter-tax-h200-llama-3.1-8b-rank16-before.json")
_LLAMA_SGLANG_KERNELS = result("adapter-tax-h200-llama-3.1-8b-rank16-sglang-kernels.json")
_ALL_SHARES = result("adapter-tax-h200-llama-3.1-8b-all-shares.json")
_LLAMA_RANK1 = result("adapter-tax-h200-llama-3.1-8b-rank1-n512.json")
_QWEN = result("adapter-tax-h200-qwen2.5-0.5b-rank16.json")
_OF_BOUND = "of the row above"
_LONG_PROMPTS_SEPARATE = result("adapter-tax-h100-llama-3.1-8b-prompt2048.json")
_LONG_PROMPTS_LORA = result("adapter-tax-h100-llama-3.1-8b-prompt2048-lora.json")
_LONG_PROMPTS_REWORKED = result("adapter-tax-h100-llama-3.1-8b-prompt2048-lora-reworked.json")
_LONG_PROMPTS_DIREFT = result("adapter-tax-h100-llama-3.1-8b-prompt2048-direft.json")
_LONG_PROMPTS_NO_WAIT = result("adapter-tax-h100-llama-3.1-8b-prompt2048-lora-no-wait.json")
_LONG_PROMPTS_DIREFT_NO_WAIT = result("adapter-tax-h100-llama-3.1-8b-prompt2048-direft-no-wait.json")
_LONG_PROMPTS_FOUR_BLOCKS = result("adapter-tax-h100-llama-3.1-8b-prompt2048-lora-four-blocks.json")
_LONG_PROMPTS_SEGMENTS = result("adapter-tax-h100-llama-3.1-8b-prompt2048-lora-segments.json")
_LONG_PROMPTS_RANKS = result("adapter-tax-h100x2-llama-3.1-8b-prompt2048-lora-two-ranks.json")
_SHRINK = result("shrink-h100.json")
_PROFILE = result("prompt-profile-h100.json")
_PROFILES_OF_SEGMENTS = (
    result("prompt-profile-h100-all-segments.json"),
    result("prompt-profile-h100-few-segments.json"),
)
_TINY = result("adapter-tax-cpu.json")
_CPU_COUNTS = (1, 8, 32, 64)


def speed() -> str:
    own, stock, counts = _LLAMA_REPEATED, _LLAMA_STOCK_REPEATED, _REPEATED_COUNTS
    rows = [
        ("no adapters", *rates(own, "none", counts)),
        ("Prelude, LoRA rank 16", *rates_and_ratios(own, "unified_lora", counts)),
        ("Prelude, DiReFT rank 8", *rates_and_ratios(own, "unified_direft", counts)),
        ("stock SGLang multi-LoRA, rank 16", *rates_and_ratios(stock, "stock", counts)),
    ]
    source = f"One {own.machine}, commit `{own.commit}`; [the commands](bench/results/README.md)."
    table = markdown(("Llama-3.1-8B's sizes, requests/s", *columns(counts)), rows)
    return "\n".join((table, "", source))


def h200_repeated() -> str:
    """What the README's table leaves out."""
    own, counts = _LLAMA_REPEATED, _REPEATED_COUNTS
    rows = [
        *_ratio_rows("", own, _LLAMA_STOCK_REPEATED, counts),
        ("median latency, no adapters / LoRA", *texts(latency_ratios(own, "unified_lora", counts)), "0.97"),
        ("median latency, no adapters / DiReFT", *texts(latency_ratios(own, "unified_direft", counts)), "0.97"),
    ]
    return markdown(("8B, medians of two loads", *columns(counts), "goal"), rows)


def h200_requests() -> str:
    rows = [
        ("8B: no adapters", *rates(_LLAMA, "none")),
        ("8B: Prelude, LoRA rank 16", *rates(_LLAMA, "unified_lora")),
        ("8B: Prelude, DiReFT rank 8", *rates(_LLAMA, "unified_direft")),
        ("8B, second run: no adapters", *rates(_LLAMA_STOCK, "none")),
        ("8B, second run: stock SGLang multi-LoRA, rank 16", *rates(_LLAMA_STOCK, "stock")),
        ("0.5B: no adapters", *rates(_QWEN, "none")),
        ("0.5B: Prelude, LoRA rank 16", *rates(_QWEN, "unified_lora")),
        ("0.5B: Prelude, DiReFT rank 8", *rates(_QWEN, "unified_direft")),
        ("0.5B: stock SGLang multi-LoRA, rank 16", *rates(_QWEN, "stock")),
    ]
    return markdown(("requests/s", *columns(GPU_COUNTS)), rows)


def h200_ratios() -> str:
    rows = [*_ratio_rows("8B: ", _LLAMA, _LLAMA_STOCK, GPU_COUNTS), *_ratio_rows("0.5B: ", _QWEN, _QWEN, GPU_COUNTS)]
    return markdown(("ratios of requests/s", *columns(GPU_COUNTS), "goal"), rows)


def _ratio_rows(model: str, own: ResultFile, stock: ResultFile, counts: Sequence[int]) -> list[Sequence[str]]:
    """Stock SGLang may have been measured in another run: both have a baseline without adapters."""
    lora, over_stock = ratios(own, "unified_lora", "none", counts), ratios(stock, "none", "stock", counts)
    lora_over_stock = [one * other for one, other in zip(lora, over_stock, strict=True)]
    return [
        (f"{model}LoRA / no adapters", *texts(lora), "0.97"),
        (f"{model}DiReFT / no adapters", *texts(ratios(own, "unified_direft", "none", counts)), "0.97"),
        (f"{model}no adapters / stock: the upper bound of the next row", *texts(over_stock), ""),
        (f"{model}LoRA / stock: (LoRA / none) x (none / stock)", *texts(lora_over_stock), f"0.97 {_OF_BOUND}"),
    ]


def h200_latencies() -> str:
    rows = [
        (f"{model}: {kind}", *texts(latency_ratios(file, system)))
        for model, file in (("8B", _LLAMA), ("0.5B", _QWEN))
        for kind, system in (("LoRA", "unified_lora"), ("DiReFT", "unified_direft"))
    ]
    return markdown(("median latency without adapters / with", *columns(GPU_COUNTS)), rows)


def h200_rank1() -> str:
    systems = {"none": "no adapters", "stock": "stock SGLang multi-LoRA, rank 1"}
    systems |= {"unified_lora": "Prelude, LoRA rank 1", "unified_direft": "Prelude, DiReFT rank 8"}
    rows = [
        (
            text,
            *rates(_LLAMA_RANK1, system, (512,)),
            *texts(ratios(_LLAMA_RANK1, system, "none", (512,))),
            *texts(ratios(_LLAMA_RANK1, system, "stock", (512,))),
        )
        for system, text in systems.items()
    ]
    return markdown(("8B, n = 512", "requests/s", "/ no adapters", "/ stock"), rows)


def all_shares() -> str:
    """One unified worker by the share of requests at all positions; stock SGLang has every adapter at all positions."""
    file, settings = _ALL_SHARES, _ALL_SHARES.document["settings"]
    counts, tokens = settings["adapters"], settings["shape"]["generated_tokens"]
    names = {mixed("unified_lora", share): f"Prelude, {share:.0%} at all positions" for share in settings["all_shares"]}
    rows = [
        (
            text,
            *rates(file, system, counts),
            *texts(ratios(file, system, "unified_lora", counts)),
            *texts(ratios(file, system, "stock", counts)),
            fixed(1000 * (file.latency_s(system, counts[0]) or 0.0) / tokens, 1),
        )
        for system, text in {**names, "stock": "stock SGLang multi-LoRA"}.items()
    ]
    head = (f"8B, {counts[0]} adapters of rank 16", "requests/s", "/ prompt only", "/ stock", "ms per generated token")
    return markdown(head, rows)


def h200_history() -> str:
    counts = (1, 8, 32, 128)
    runs = {
        "SGLang's LoRA kernels, 128 slots": _LLAMA_SGLANG_KERNELS,
        "Prelude's expand kernel, 128 slots": _LLAMA_BEFORE,
        "Prelude's expand kernel, 512 slots": _LLAMA,
        "the same, loads of 21 s": _LLAMA_REPEATED,
    }
    rows = []
    for text, file in runs.items():
        found = (file.document["ratios"]["c/a"].get(str(n)) for n in counts)
        rows.append((text, f"`{file.commit}`", *("" if ratio is None else fixed(ratio, 2) for ratio in found)))
    return markdown(("8B, LoRA rank 16 / no adapters", "commit", *columns(counts)), rows)


def long_prompts() -> str:
    """Some runs were cut short: see bench/results/README.md for the loads of each."""
    runs = (
        ("LoRA rank 16, separate expand step", _LONG_PROMPTS_SEPARATE, "unified_lora", "c/a"),
        (
            "LoRA rank 16, gate's and up's joined with SiLU, own shrink kernel",
            _LONG_PROMPTS_LORA,
            "unified_lora",
            "c/a",
        ),
        ("LoRA rank 16, joined kernel and ReFT's steps reworked", _LONG_PROMPTS_REWORKED, "unified_lora", "c/a"),
        (
            "LoRA rank 16, no wait for the GPU, shrink programs that share inputs",
            _LONG_PROMPTS_NO_WAIT,
            "unified_lora",
            "c/a",
        ),
        ("the same, four blocks per expand program", _LONG_PROMPTS_FOUR_BLOCKS, "unified_lora", "c/a"),
        ("LoRA rank 16, graphs with fewer empty segments", _LONG_PROMPTS_SEGMENTS, "unified_lora", "c/a"),
        ("LoRA rank 16, two ranks on two GPUs", _LONG_PROMPTS_RANKS, "unified_lora", "c/a"),
        ("DiReFT rank 8", _LONG_PROMPTS_DIREFT, "unified_direft", "d/a"),
        ("DiReFT rank 8, no wait for the GPU", _LONG_PROMPTS_DIREFT_NO_WAIT, "unified_direft", "d/a"),
    )
    rows = [
        (
            name,
            f"`{file.commit}`",
            *rates(file, "none", (32,)),
            *rates(file, system, (32,)),
            fixed(file.document["ratios"][ratio]["32"], 3),
            "0.97",
        )
        for name, file, system, ratio in runs
    ]
    return markdown(("8B, 32 adapters, requests/s", "commit", "no adapters", "with adapters", "ratio", "goal"), rows)


def shrink() -> str:
    """Of all four projections; each batch has the same number of adapters."""
    rows = _SHRINK.document["rows"]
    table = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        for name, key in (("SGLang's", "sglang"), ("ours", "ours"), ("cuBLAS, one adapter", "cublas")):
            found = [row[key] for row in rows if row["tokens"] == tokens]
            cells = (fixed(value, 1) for value in (*found, sum(found)))
            table.append((f"{tokens:,}" if key == "sglang" else "", name, *cells))
    projections = list(dict.fromkeys(row["projection"] for row in rows))
    return markdown(("tokens", "kernel, µs", *projections, "all"), table)


_KERNEL_GROUPS = {
    "shrink steps, LoRA's and ReFT's": ("_shrink_kernel",),
    "expand steps, LoRA's and ReFT's": ("_expand_kernel",),
    "activation, with gate's and up's expand step": ("_gate_up_kernel", "act_and_mul"),
}
_PROFILED = {"plain": "SGLang, no adapter slots", "none": "base model", "lora": "LoRA rank 16"}


def prompt_profile() -> str:
    """What the client waits for, and what the GPU does meanwhile."""
    rows = []
    for row in _PROFILE.document["rows"]:
        values = (row["client_ms"], row["busy_ms"], *_by_group(row))
        rows.append((f"{row['prompt_tokens']:,}", _PROFILED[row["kind"]], *(fixed(value, 2) for value in values)))
    return markdown(("tokens", "ms per prompt", "client", "all kernels", *_KERNEL_GROUPS), rows)


def graph_segments() -> str:
    """Kernels of prompts whose graphs have programs for the largest graph's segments, and for their own."""
    before, after = (
        {(row["prompt_tokens"], row["kind"]): (row["busy_ms"], *_by_group(row)) for row in file.document["rows"]}
        for file in _PROFILES_OF_SEGMENTS
    )
    rows = [
        (
            f"{tokens:,}",
            _PROFILED[kind],
            *(
                f"{fixed(first, 2)} -> {fixed(then, 2)}"
                for first, then in zip(before[tokens, kind], values, strict=True)
            ),
        )
        for (tokens, kind), values in after.items()
    ]
    return markdown(("tokens", "ms per prompt", "all kernels", *_KERNEL_GROUPS), rows)


def _by_group(row: dict[str, Any]) -> list[float]:
    return [
        sum(part["ms"] for part in row["parts"] if any(name in part["name"] for name in names))
        for names in _KERNEL_GROUPS.values()
    ]


def cpu_requests() -> str:
    counts = (0, *_CPU_COUNTS)
    systems = {
        "none": "no adapters",
        "stock": "stock SGLang multi-LoRA",
        "unified_lora": "Prelude, LoRA, unified worker",
        "unified_direft": "Prelude, DiReFT, unified worker",
        "pd": "Prelude, LoRA, prefill/decode pair",
    }
    rows = [(text, *rates(_TINY, system, counts)) for system, text in systems.items()]
    return markdown(("requests/s, medians", *columns(counts)), rows)


def cpu_ratios() -> str:
    lines = (
        ("LoRA / no adapters", Ratio("c/a", "unified_lora", "none"), "0.90"),
        ("DiReFT / no adapters", Ratio("d/a", "unified_direft", "none"), "0.95"),
        ("no adapters / stock: the upper bound of the next row", Ratio("a/b", "none", "stock"), ""),
        ("LoRA / stock", Ratio("c/b", "unified_lora", "stock"), f"0.90 {_OF_BOUND}"),
        ("a pair with n adapters / the same pair without", Ratio("e(n)/e(0)", "pd", "pd", 0), "0.97 at n = 64"),
        ("no adapters at n / at 0: the same requests, so drift", Ratio("a(n)/a(0)", "none", "none", 0), ""),
    )
    measurements = _TINY.measurements
    rows = [
        (
            text,
            *("" if value is None else fixed(value, 2) for value in (ratio.at(measurements, n) for n in _CPU_COUNTS)),
            goal,
        )
        for text, ratio, goal in lines
    ]
    return markdown(("median of the repeats' ratios", *columns(_CPU_COUNTS), "goal"), rows)
