"""`prelude bench prompt-profile`, `shrink` and `kv-pages`. Imports of engines wait for the run."""

from __future__ import annotations

import argparse
from typing import Any

from cli.bench.arguments import MODELS, add_engine_options, add_json, numbers, positive, words
from cli.bench.given_options import with_given
from cli.bench.outcome import failure_ends, run_of, say
from cli.bench.recorded import recorded_command


def add_commands(benchmarks: Any) -> None:
    """Add them to the benchmarks."""
    text = "Where an engine's time goes while it reads prompts, kernel by kernel, with and without an adapter."
    profile = benchmarks.add_parser("prompt-profile", help=text, description=text)
    profile.add_argument("--kinds", type=words, help="any of plain,none,lora,direft; default: none,lora")
    profile.add_argument("--prompt-tokens", type=numbers, metavar="N,…", help="default: 128")
    profile.add_argument("--timed", type=positive, metavar="N", help="prompts of each kind; default: 10")
    profile.add_argument("--profiled", type=positive, metavar="N", help="prompts of each kind; default: 4")
    profile.add_argument("--slots", type=positive, help="adapter slots; default: 8")
    profile.add_argument("--lora-rank", type=positive, help="default: 16")
    profile.add_argument("--reft-rank", type=positive, help="default: 8")
    profile.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    add_engine_options(profile)
    profile.add_argument("--quick", action="store_true", help="a smoke test: few prompts")
    add_json(profile)
    profile.set_defaults(run=run_of("bench.kernels.prompt_profile"))
    text = "LoRA's shrink step alone on a GPU: SGLang's kernel, Prelude's, and cuBLAS with one adapter."
    shrink = benchmarks.add_parser("shrink", help=text, description=text)
    shrink.add_argument("--tokens", type=numbers, metavar="N,…", help="of a batch; default: 512,2048,8192")
    shrink.add_argument("--adapters", type=positive, help="of a batch; default: 4")
    shrink.add_argument("--model", choices=MODELS, help="model dimensions; default: llama-3.1-8b")
    shrink.add_argument("--lora-rank", type=positive, help="default: 16")
    add_json(shrink)
    shrink.set_defaults(run=_shrink)
    text = "What a prompt's KV takes from one process to another, by the tokens of a page, without engines."
    transfer = benchmarks.add_parser("kv-pages", help=text, description=text)
    transfer.add_argument("--page-tokens", type=numbers, metavar="N,…", help="default: 1,16,64")
    transfer.add_argument("--prompt-tokens", type=numbers, metavar="N,…", help="default: 256,2048")
    transfer.add_argument("--kv-tokens", type=positive, metavar="N", help="of each side's KV cache; default: 8192")
    transfer.add_argument("--repeats", type=positive, help="of each transfer; default: 9")
    transfer.add_argument("--model", choices=MODELS, help="model dimensions; default: llama-3.1-8b")
    transfer.add_argument("--device", choices=("cpu", "cuda"), help="where KV is; default: cpu")
    transfer.add_argument("--gpus", type=positive, dest="num_gpus", metavar="N", help="1 or 2; default: 1")
    transfer.add_argument("--quick", action="store_true", help="a smoke test: one short prompt")
    add_json(transfer)
    transfer.set_defaults(run=run_of("bench.serving.kv_pages"))


@failure_ends
def _shrink(arguments: argparse.Namespace) -> None:
    from bench.kernels import shrink

    shrink.run(with_given(shrink.Options(), arguments), recorded_command(), arguments.json, say)
