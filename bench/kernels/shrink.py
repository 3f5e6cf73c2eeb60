"""Benchmark of LoRA's shrink step alone: SGLang's kernel, ours, and the same product by cuBLAS for one adapter.

Launches are captured in a CUDA graph, so that only the GPU's time counts. Inputs lie in its L2 cache as far as they
fit, as they do in an engine, where the kernel before has just written them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.errors import BenchError
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.systems.models import MODELS

_CHUNK = 128  # tokens of a segment, as in SGLang from 256 tokens on


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    tokens: tuple[int, ...] = (512, 2048, 8192)  # of a batch
    adapters: int = 4  # of a batch, which share its tokens
    model: str = "llama-3.1-8b"  # a key of bench.systems.models.MODELS
    lora_rank: int = 16


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print a line for each projection, write the file; returns its content. Raises BenchError."""
    config = MODELS[options.model].config
    if config is None:
        raise BenchError(f"--model {options.model}: give one of a published model's sizes")
    require_folders(json_path)
    try:
        import torch
        from triton.testing import do_bench_cudagraph
    except ImportError as error:
        raise BenchError(f"{error}; it is in requirements/gpu.txt") from error
    if not torch.cuda.is_available():
        raise BenchError("this benchmark needs a CUDA GPU, and there is none here")
    from engine.adapter_slots.lora_shrink import replaced_kernel
    from engine.adapter_slots.lora_shrink import shrink as ours

    theirs = replaced_kernel()

    rows: list[dict[str, Any]] = []
    document = {**provenance.head("shrink", command, asdict(options), "cuda"), "rows": rows}
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    with growing_json(document, json_path, "after all shapes") as write:
        for tokens in options.tokens:
            batch = _batch(tokens, options.adapters, options.lora_rank)
            for name, inputs, slices in (
                ("q, k and v", hidden, 3), ("o", hidden, 1), ("gate and up", hidden, 2), ("down", inner, 1),
            ):  # fmt: skip
                x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
                shape = (options.adapters + 1, slices * options.lora_rank, inputs)
                a = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / inputs**0.5
                calls: dict[str, Callable[[], Any]] = {
                    "sglang": partial(theirs, x, a, batch, slices),
                    "ours": partial(ours, x, a, batch, slices),
                    "cublas": partial(torch.matmul, x, a[1].t()),
                }
                difference = (calls["ours"]().float() - calls["sglang"]().float()).abs().max().item()
                took_us = {system: round(1000 * do_bench_cudagraph(call), 1) for system, call in calls.items()}
                rows.append({"tokens": tokens, "projection": name, "difference": difference, **took_us})
                write()
                progress(
                    f"{tokens:6} tokens, {name:12} SGLang's {took_us['sglang']:6.1f} µs, ours {took_us['ours']:6.1f}, "
                    f"cuBLAS {took_us['cublas']:6.1f}; largest difference {difference:g}"
                )
    return document


def _batch(tokens: int, adapters: int, rank: int) -> Any:
    """A batch as SGLang's csgmv backend describes it. Slot 0 is the base model's, which has no tokens here."""
    import torch

    slots, bounds = [], [0]
    share = -(-tokens // adapters)
    for slot in range(1, adapters + 1):
        end = min(tokens, slot * share)
        while bounds[-1] < end:
            slots.append(slot)
            bounds.append(min(end, bounds[-1] + _CHUNK))

    def on_gpu(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return SimpleNamespace(
        use_cuda_graph=False,
        num_segments=len(slots),
        seg_indptr=on_gpu(bounds),
        weight_indices=on_gpu(slots),
        lora_ranks=on_gpu([0] + [rank] * adapters),
        permutation=torch.arange(tokens, dtype=torch.int32, device="cuda"),
        max_len=_CHUNK,
    )
