"""The kept curves of a GPU: `prelude plan`'s formulas, which follow from measurements, at the points of a curve.

`python -m bench.simulator.planned` writes bench/simulator/curves/h200-llama-3.1-8b.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench.simulator.curves import FOLDER, Curves, Decode, Limits, Loads, Point, Prefill, Transfer, write_curves
from bench.systems.models import MODELS
from cluster.local.memory_plan import GPU_SHARE, ModelSizes, engine_memory
from cluster.planning.gpus import GPUS
from cluster.planning.speed import Speed

H200_8B = "h200-llama-3.1-8b"
RANK, SLOTS, MAX_RUNNING, CHUNK_TOKENS = 16, 32, 256, 2048
_BATCHES = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_STORE_BYTES_PER_S = 25e9 / 8
_HANDOFF_MS = 5.6  # of a pair's first token, beside the transfer itself
_TRANSFERS = ((512, 20e9), (4096, 75e9))  # tokens, bytes per second


def h200_llama_8b() -> Curves:
    """LoRA of rank 16 on all projections of Llama-3.1-8B's sizes in bfloat16, one H200."""
    gpu, results = GPUS["h200"], FOLDER.parents[1] / "results"
    with tempfile.TemporaryDirectory() as folder:
        config = {**(MODELS["llama-3.1-8b"].config or {}), "architectures": ["LlamaForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        sizes = ModelSizes.read(Path(folder))
    speed, base = Speed(sizes, gpu, 1), sizes.base
    flops = gpu.flops * speed.coefficients.compute_share
    head_ms = 1000 * 2 * base.vocabulary * base.hidden / flops
    attention_ns = 1e9 * 4 * base.num_layers * base.heads * base.head_dim / flops
    cold = json.loads((results / "cold-load-h200.json").read_text())
    slots = json.loads((results / "slots-h200-llama-3.1-8b-rank16.json").read_text())
    adapter_bytes = sizes.adapter_bytes(RANK)
    memory = engine_memory(sizes, int(gpu.memory_bytes * GPU_SHARE), 1, (SLOTS + 1) * adapter_bytes)

    def batch_ms(tokens: int) -> float:
        computed_ms = 1000 * (speed.prompt_s(tokens, lora_share=0.0) - speed.coefficients.prompt_s) - head_ms
        computed_ms -= 1e-6 * attention_ns * tokens**2 / 2
        return max(computed_ms, 1000 * (speed.step_s(1, 0) - speed.coefficients.step_s)) + overhead_ms

    overhead_ms = 1000 * speed.coefficients.step_s
    prompt_ms = head_ms + 1000 * (speed.coefficients.prompt_s + speed.coefficients.lora_prompt_s)
    steps: tuple[Point, ...] = tuple((number, _rounded(1000 * speed.step_s(number, 0))) for number in _SEQUENCES)
    load_ms, from_store_ms = cold["one_cold_ms"], 1000 * adapter_bytes / _STORE_BYTES_PER_S
    fills = [row["fill_ms"] for row in slots["rows"] if row["fills"]]
    kv_bytes = sizes.kv_bytes_per_token
    transfers = ((tokens, 1000 * tokens * kv_bytes / rate + _HANDOFF_MS) for tokens, rate in _TRANSFERS)
    return Curves(
        name=H200_8B,
        text="Llama-3.1-8B's sizes, bfloat16, LoRA rank 16 on all projections, one H200, SGLang 0.5.17",
        sources={
            "prefill, decode": "the formulas of docs/capacity.md with their measured coefficients: bench/results/"
            "adapter-tax-h200-llama-3.1-8b-rank16-unified.json and adapter-tax-h200-qwen2.5-0.5b-rank16.json "
            "(commit e8ef04d), and 1024 prompts of 128 tokens (bench/results/README.md). "
            "One pair of lengths was measured; other lengths and batches are the formula's",
            "transfer": "two H200 of one host, one repeat, without a result file: 512 tokens at 20 GB/s, 4096 at "
            "75 GB/s, and a first token 9 ms later than one engine's at 512",
            "loads": "13.6 ms for a small adapter: bench/results/cold-load-h200.json (commit "
            f"70322f0). Assumed: {adapter_bytes / 1e6:.0f} MB from a store at 25 Gbit/s, which loads share. "
            "fill_ms: bench/results/slots-h200-llama-3.1-8b-rank16.json (commit 70322f0), as the engine counts it",
            "limits": f"KV in {GPU_SHARE:.0%} of the GPU's memory beside weights and {SLOTS} slots; else settings",
            "answer_ms": "assumed",
        },
        prefill=Prefill(
            tuple((tokens, _rounded(batch_ms(tokens))) for tokens in _BATCHES),
            pair_ns=_rounded(attention_ns),
            prompt_ms=_rounded(prompt_ms),
            adapter_factor=speed.coefficients.lora_factor,
        ),
        decode=Decode(steps, _rounded(1e9 * kv_bytes / (gpu.memory_bytes_per_s * speed.coefficients.bandwidth_share))),
        transfer=Transfer(((0, _HANDOFF_MS), *((tokens, _rounded(ms)) for tokens, ms in transfers))),
        loads=Loads(
            store_ms=_rounded(load_ms + from_store_ms),
            serial_ms=_rounded(from_store_ms),
            parallel=8,
            fill_ms=max(fills),
        ),
        limits=Limits(CHUNK_TOKENS, MAX_RUNNING, memory.max_tokens, SLOTS),
        answer_ms=2.0,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    write_curves(h200_llama_8b(), FOLDER / f"{H200_8B}.json")
