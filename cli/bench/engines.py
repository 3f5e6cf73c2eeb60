"""`prelude bench adapter-tax`. Imports of engines wait for the run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cli.bench.arguments import (
    MODELS,
    add_engine_options,
    add_json,
    not_negative_float,
    numbers,
    positive,
)
from cli.bench.outcome import failure_ends, say
from cli.bench.recorded import recorded_command

# A copy of bench.systems.systems.SYSTEMS, which takes long to import.
_SYSTEMS = ("none", "stock", "unified_lora", "unified_direft", "pd")


def add_commands(benchmarks: Any) -> None:
    """Add them to `prelude bench`."""
    text = (
        "Requests/s over the number of adapters: without adapters, SGLang's LoRA, Prelude with one engine and with two."
    )
    tax = benchmarks.add_parser("adapter-tax", help=text, description=text)
    tax.add_argument("--systems", type=_names, default=_SYSTEMS, help=f"default: {','.join(_SYSTEMS)}")
    tax.add_argument("--adapters", type=numbers, help="numbers of adapters in use; default: 1,8,32,64")
    tax.add_argument("--repeats", type=positive, help="default: 3")
    tax.add_argument("--requests", type=positive, help="requests per load; default: 192")
    tax.add_argument("--concurrency", type=positive, default=16, help="concurrent requests; default: 16")
    tax.add_argument("--prompt-tokens", type=positive, default=128, help="default: 128")
    tax.add_argument("--generated-tokens", type=positive, default=32, help="default: 32")
    tax.add_argument("--slots", type=positive, default=8, help="adapter slots of each engine; default: 8")
    tax.add_argument("--model", choices=MODELS, default="tiny", help="model dimensions; default: tiny")
    tax.add_argument("--lora-rank", type=positive, default=16, help="default: 16")
    tax.add_argument("--reft-rank", type=positive, default=8, help="default: 8")
    tax.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N", help="ranks of each engine; default: 1"
    )
    tax.add_argument(
        "--all-shares",
        type=_shares,
        default=(),
        metavar="SHARE,…",
        help="such as 0,0.5,1: unified_lora with adapters that act at all positions in these shares of its requests",
    )
    tax.add_argument(
        "--pd-through",
        choices=("engines", "router"),
        default="engines",
        help="send pd's requests to its two engines directly, or through a router; default: engines",
    )
    add_engine_options(tax)
    tax.add_argument("--quick", action="store_true", help="a smoke test: 1 and 8 adapters, one repeat, 32 requests")
    add_json(tax)
    tax.add_argument("--plot", type=Path, metavar="FILE", help="draw a plot, .png or .svg")
    tax.set_defaults(run=_adapter_tax)


@failure_ends
def _adapter_tax(arguments: argparse.Namespace) -> None:
    from bench import adapter_tax
    from bench.options import Options, Shape

    options = Options(
        systems=arguments.systems,
        adapters=arguments.adapters or ((1, 8) if arguments.quick else (1, 8, 32, 64)),
        repeats=arguments.repeats or (1 if arguments.quick else 3),
        shape=Shape(
            arguments.prompt_tokens,
            arguments.generated_tokens,
            arguments.concurrency,
            arguments.requests or (32 if arguments.quick else 192),
        ),
        num_slots=arguments.slots,
        pd_through=arguments.pd_through,
        model=arguments.model,
        device=arguments.device,
        lora_rank=arguments.lora_rank,
        reft_rank=arguments.reft_rank,
        tensor_parallel=arguments.tensor_parallel,
        engine_arguments=arguments.engine_arguments,
        all_shares=arguments.all_shares,
    )
    adapter_tax.run(options, recorded_command(), arguments.json, arguments.plot, say)


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(sorted({not_negative_float(word) for word in text.split(",")}))
    if shares[-1] > 1:
        raise argparse.ArgumentTypeError(f"{shares[-1]:g} is no share, which is at most 1")
    return shares


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(names) - set(_SYSTEMS):
        raise argparse.ArgumentTypeError(
            f"unknown system {', '.join(sorted(unknown))}; choose from {', '.join(_SYSTEMS)}"
        )
    return tuple(name for name in _SYSTEMS if name in names)
