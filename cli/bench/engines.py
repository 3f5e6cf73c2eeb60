"""Benchmarks of engines and their adapters. Imports of them wait for the run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cli.bench.arguments import (
    MODELS,
    add_engine_options,
    add_json,
    add_slots_and_load,
    counts,
    not_negative_float,
    numbers,
    positive,
    words,
)
from cli.bench.outcome import failure_ends, run_of, say
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
    text = "Cold adapters: one load, concurrent loads, their effect on resident adapters, more adapters than memory."
    cold = benchmarks.add_parser("cold-load", help=text, description=text)
    cold.add_argument("--quick", action="store_true", help="a smoke test: few adapters of a small model")
    cold.add_argument(
        "--store-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="latency of the store, which is then an S3 server; default: a folder as store",
    )
    cold.add_argument("--model", choices=MODELS, help="model dimensions; default: 32 layers of hidden size 256")
    cold.add_argument("--rank", type=positive, help="of the adapters; default: 16")
    cold.add_argument(
        "--room",
        dest="budget",
        metavar="N",
        type=positive,
        help="adapters that fit in host memory; four times as many are used; default: 32",
    )
    cold.add_argument(
        "--arrivals",
        dest="num_cold",
        metavar="N",
        type=positive,
        help="cold adapters that arrive in each repeat; default: 64",
    )
    cold.add_argument("--repeats", type=positive, help="default: 3")
    add_engine_options(cold)
    add_json(cold)
    cold.set_defaults(run=run_of("bench.cold_load"))
    text = (
        "More adapters than host memory: requests/s and TTFT against a load whose adapters fit, unified and as a pair."
    )
    memory = benchmarks.add_parser("host-memory", help=text, description=text)
    memory.add_argument("--layouts", type=words, help="default: unified,pair")
    memory.add_argument("--adapters", type=positive, help="number of adapters that requests rotate over; default: 32")
    memory.add_argument("--room", type=positive, help="adapters that fit in host memory; default: 8")
    memory.add_argument("--fitting", type=positive, help="adapters of the load that fits; default: 6")
    memory.add_argument("--num-requests", type=positive, metavar="N", help="per load; default: 96")
    add_slots_and_load(memory)
    memory.add_argument("--quick", action="store_true", help="a smoke test: few adapters and requests")
    add_engine_options(memory)
    add_json(memory)
    memory.set_defaults(run=run_of("bench.host_memory"))
    text = "More adapters than slots: TTFT and requests/s of one engine that swaps adapters into prefill batches."
    slots = benchmarks.add_parser("slots", help=text, description=text)
    slots.add_argument("--adapters", type=numbers, help="numbers of adapters in use; default: 8,32")
    slots.add_argument(
        "--requests", type=positive, dest="num_requests", metavar="N", help="requests per load; default: 96"
    )
    add_slots_and_load(slots)
    slots.add_argument("--lora-rank", type=positive, help="default: 16")
    slots.add_argument("--quick", action="store_true", help="a smoke test: 2 slots, 16 requests, one repeat")
    add_engine_options(slots)
    add_json(slots)
    slots.set_defaults(run=run_of("bench.slot_swaps"))
    text = "A pair without requests: what its processes take of the cores, and the time to the next first token."
    idle = benchmarks.add_parser("idle", help=text, description=text)
    idle.add_argument("--seconds", type=float, help="duration without requests; default: 20")
    idle.add_argument("--requests", type=positive, help="after a pause, and as many without; default: 30")
    idle.add_argument("--prompt-tokens", type=positive, help="default: 512")
    idle.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    idle.add_argument("--quick", action="store_true", help="a smoke test: two seconds, three requests")
    add_engine_options(idle)
    add_json(idle)
    idle.set_defaults(run=run_of("bench.serving.idle_pair"))
    text = (
        "The first token of single prompts: a pair beside a unified worker, and how long each stage of engines takes."
    )
    first = benchmarks.add_parser("first-token", help=text, description=text)
    first.add_argument("--layouts", type=words, help="any of pair,unified; default: both, asked in turn")
    first.add_argument("--prompt-tokens", type=counts, metavar="N,…", help="default: 64,512")
    first.add_argument("--requests", type=positive, help="of each length, at each layout; default: 20")
    first.add_argument("--gpus", type=positive, dest="num_gpus", metavar="N", help="of the pair; default: 1")
    first.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    first.add_argument("--quick", action="store_true", help="a smoke test: short prompts, few requests")
    add_engine_options(first)
    add_json(first)
    first.set_defaults(run=run_of("bench.serving.first_token"))
    text = "What streaming costs an engine's HTTP server and the engine, by its bound on events per second."
    streams = benchmarks.add_parser("streams", help=text, description=text)
    streams.add_argument("--bounds", type=counts, help="events per second, 0 for no bound; default: 0,200")
    streams.add_argument("--concurrency", type=positive, help="concurrent requests; default: 16")
    streams.add_argument("--requests", type=positive, dest="num_requests", metavar="N", help="per load; default: 64")
    streams.add_argument("--prompt-tokens", type=positive, help="default: 16")
    streams.add_argument("--generated-tokens", type=positive, help="default: 128")
    streams.add_argument("--repeats", type=positive, help="default: 3")
    streams.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    streams.add_argument("--quick", action="store_true", help="a smoke test: one engine, few requests")
    add_engine_options(streams)
    add_json(streams)
    streams.set_defaults(run=run_of("bench.serving.streams"))


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
