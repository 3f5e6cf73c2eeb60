"""`prelude bench …`: every benchmark prints its numbers and writes them with `--json FILE`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cli.bench import goodput as bench_goodput
from cli.bench import kernels as bench_kernels
from cli.bench import load as bench_load
from cli.bench import matrix as bench_matrix
from cli.bench import simulate as bench_simulate
from cli.bench import training as bench_training
from cli.bench.given_options import with_given
from cli.bench.load import MODELS, numbers, positive, words
from cli.bench.outcome import failure_ends, say
from cli.bench.recorded import recorded_command

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# A copy of bench.systems.systems.SYSTEMS, which takes long to import.
_SYSTEMS = ("none", "stock", "unified_lora", "unified_direft", "pd")

Options = TypeVar("Options", bound="DataclassInstance")


def add_commands(commands: Any) -> None:
    """Add `bench` and the benchmarks to the command line."""
    text = "Run a benchmark on this machine."
    group = commands.add_parser("bench", help=text, description=text)
    benchmarks = group.add_subparsers(required=True, metavar="benchmark")
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
        "--pd-through",
        choices=("engines", "router"),
        default="engines",
        help="send pd's requests to its two engines directly, or through a router; default: engines",
    )
    _add_engine_options(tax)
    tax.add_argument("--quick", action="store_true", help="a smoke test: 1 and 8 adapters, one repeat, 32 requests")
    _add_json(tax)
    tax.add_argument("--plot", type=Path, metavar="FILE", help="draw a plot, .png or .svg")
    tax.set_defaults(run=_adapter_tax)
    text = "Latency of a full catalog: resolving from the database and from memory, listing, importing."
    catalog = benchmarks.add_parser("catalog", help=text, description=text)
    catalog.add_argument("--revisions", type=positive, default=1_000_000, help="default: 1000000")
    catalog.add_argument("--adapters", type=positive, default=100_000, help="default: 100000")
    catalog.add_argument("--database", metavar="URL", help="an empty database; default: a temporary SQLite file")
    _add_json(catalog)
    catalog.set_defaults(run=_catalog)
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
    _add_engine_options(cold)
    _add_json(cold)
    cold.set_defaults(run=_cold_load)
    text = (
        "More adapters than host memory: requests/s and TTFT against a load whose adapters fit, unified and as a pair."
    )
    memory = benchmarks.add_parser("host-memory", help=text, description=text)
    memory.add_argument("--layouts", type=words, help="default: unified,pair")
    memory.add_argument("--adapters", type=positive, help="number of adapters that requests rotate over; default: 32")
    memory.add_argument("--room", type=positive, help="adapters that fit in host memory; default: 8")
    memory.add_argument("--fitting", type=positive, help="adapters of the load that fits; default: 6")
    memory.add_argument("--num-requests", type=positive, metavar="N", help="per load; default: 96")
    _add_slots_and_load(memory)
    memory.add_argument("--quick", action="store_true", help="a smoke test: few adapters and requests")
    _add_engine_options(memory)
    _add_json(memory)
    memory.set_defaults(run=_host_memory)
    text = (
        "CPU time of the router per streamed event and per request, and added latency, next to SGLang's Rust gateway."
    )
    router = benchmarks.add_parser("router", help=text, description=text)
    router.add_argument("--concurrency", type=numbers, help="connections of each load; default: 32,128")
    router.add_argument("--repeats", type=positive, help="default: 3")
    router.add_argument(
        "--events", type=positive, dest="num_events", metavar="N", help="events per stream; default: 64"
    )
    router.add_argument("--event-gap-ms", type=float, metavar="MS", help="gap between events; default: 10")
    router.add_argument("--processes", type=positive, help="processes of Prelude's router; default: 1")
    router.add_argument(
        "--trace-ratio",
        type=float,
        metavar="RATIO",
        help="measure a second router beside it that traces this share of the requests, 0 to 1",
    )
    router.add_argument(
        "--sglang-router",
        metavar="PYTHON",
        help="an interpreter with sglang-router 0.3.2; default: this one, if it has the package",
    )
    router.add_argument("--quotas", action="store_true", help="also measure a router with quotas")
    router.add_argument("--keys", action="store_true", help="also measure a router that asks for API keys")
    router.add_argument(
        "--protected", action="store_true", help="also measure a router with keys, quotas and TLS together"
    )
    router.add_argument(
        "--tls", action="store_true", help="also measure a router with TLS for clients and mutual TLS to workers"
    )
    router.add_argument("--quick", action="store_true", help="a smoke test: 8 connections, few requests, one repeat")
    _add_json(router)
    router.set_defaults(run=_router)

    text = "How long the most expensive request bodies block the event loops of the router and of an engine."
    admission = benchmarks.add_parser("admission", help=text, description=text)
    admission.add_argument("--repeats", type=positive, help="default: 3")
    admission.add_argument("--no-engine", action="store_true", help="the router only, with mock workers behind it")
    admission.add_argument("--only", help="bodies whose name has one of these words, separated by commas")
    _add_json(admission)
    admission.set_defaults(run=_admission)

    text = "Real workers with more adapters than memory: cold loads and TTFT with and without adapter affinity."
    affinity = benchmarks.add_parser("affinity", help=text, description=text)
    affinity.add_argument("--requests", type=positive, dest="num_requests", metavar="N", help="default: 1000")
    affinity.add_argument("--workers", type=positive, dest="num_workers", metavar="N", help="default: 4")
    affinity.add_argument("--quick", action="store_true", help="a smoke test: 2 workers, few adapters and requests")
    _add_engine_options(affinity)
    _add_json(affinity)
    affinity.set_defaults(run=_affinity)
    text = "Kill and stop processes of a real cluster: what clients see, how fast it recovers, what is left behind."
    chaos = benchmarks.add_parser("chaos", help=text, description=text)
    chaos.add_argument(
        "--layout",
        type=words,
        dest="layouts",
        metavar="LAYOUTS",
        help="pair, pairs (two of each role) or unified (two workers), or several, separated by commas; default: pair",
    )
    chaos.add_argument("--in-flight", type=_counts, help="requests at the time of the signal; default: 0,32")
    chaos.add_argument("--signals", type=words, help="default: kill,stop")
    chaos.add_argument("--parts", type=words, help="default: router,agent,server,scheduler,detokenizer")
    chaos.add_argument("--quick", action="store_true", help="a smoke test: one kill of one scheduler")
    _add_json(chaos)
    chaos.set_defaults(run=_chaos)
    text = (
        "A long load with disconnecting clients and a kill per minute: memory, file descriptors, p99 after each kill."
    )
    soak = benchmarks.add_parser("soak", help=text, description=text)
    soak.add_argument("--minutes", type=float, help="duration of the load; default: 30")
    soak.add_argument("--load", type=float, help="share of the measured capacity; default: 0.8")
    soak.add_argument("--adapters", type=positive, help="default: 200")
    soak.add_argument("--kill-every", type=float, metavar="S", dest="kill_every_s", help="default: 60")
    soak.add_argument(
        "--layout", choices=("pair", "unified"), help="one pair, or two unified workers; default: unified"
    )
    soak.add_argument("--quick", action="store_true", help="a smoke test: 2 minutes, 20 adapters")
    _add_json(soak)
    soak.set_defaults(run=_soak)
    text = "Placement alone: simulated fleets under several policies, and the CPU time of one placement."
    placement = benchmarks.add_parser("placement", help=text, description=text)
    placement.add_argument("--placements", type=positive, help="number of placements to time; default: 20000")
    placement.add_argument("--quick", action="store_true", help="a smoke test: one small scenario")
    _add_json(placement)
    placement.set_defaults(run=_placement)
    text = "A pair without requests: what its processes take of the cores, and the time to the next first token."
    idle = benchmarks.add_parser("idle", help=text, description=text)
    idle.add_argument("--seconds", type=float, help="duration without requests; default: 20")
    idle.add_argument("--requests", type=positive, help="after a pause, and as many without; default: 30")
    idle.add_argument("--prompt-tokens", type=positive, help="default: 512")
    idle.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    idle.add_argument("--quick", action="store_true", help="a smoke test: two seconds, three requests")
    _add_engine_options(idle)
    _add_json(idle)
    idle.set_defaults(run=_idle)
    text = (
        "The first token of single prompts: a pair beside a unified worker, and how long each stage of engines takes."
    )
    first = benchmarks.add_parser("first-token", help=text, description=text)
    first.add_argument("--layouts", type=words, help="any of pair,unified; default: both, asked in turn")
    first.add_argument("--prompt-tokens", type=_counts, metavar="N,…", help="default: 64,512")
    first.add_argument("--requests", type=positive, help="of each length, at each layout; default: 20")
    first.add_argument("--gpus", type=positive, dest="num_gpus", metavar="N", help="of the pair; default: 1")
    first.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    first.add_argument("--quick", action="store_true", help="a smoke test: short prompts, few requests")
    _add_engine_options(first)
    _add_json(first)
    first.set_defaults(run=_first_token)
    text = "What streaming costs an engine's HTTP server and the engine, by its bound on events per second."
    streams = benchmarks.add_parser("streams", help=text, description=text)
    streams.add_argument("--bounds", type=_counts, help="events per second, 0 for no bound; default: 0,200")
    streams.add_argument("--concurrency", type=positive, help="concurrent requests; default: 16")
    streams.add_argument("--requests", type=positive, dest="num_requests", metavar="N", help="per load; default: 64")
    streams.add_argument("--prompt-tokens", type=positive, help="default: 16")
    streams.add_argument("--generated-tokens", type=positive, help="default: 128")
    streams.add_argument("--repeats", type=positive, help="default: 3")
    streams.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")
    streams.add_argument("--quick", action="store_true", help="a smoke test: one engine, few requests")
    _add_engine_options(streams)
    _add_json(streams)
    streams.set_defaults(run=_streams)
    text = "More adapters than slots: TTFT and requests/s of one engine that swaps adapters into prefill batches."
    slots = benchmarks.add_parser("slots", help=text, description=text)
    slots.add_argument("--adapters", type=numbers, help="numbers of adapters in use; default: 8,32")
    slots.add_argument(
        "--requests", type=positive, dest="num_requests", metavar="N", help="requests per load; default: 96"
    )
    _add_slots_and_load(slots)
    slots.add_argument("--lora-rank", type=positive, help="default: 16")
    slots.add_argument("--quick", action="store_true", help="a smoke test: 2 slots, 16 requests, one repeat")
    _add_engine_options(slots)
    _add_json(slots)
    slots.set_defaults(run=_slots)
    bench_load.add_command(benchmarks)
    bench_matrix.add_command(benchmarks)
    bench_goodput.add_command(benchmarks)
    bench_kernels.add_commands(benchmarks)
    bench_simulate.add_command(benchmarks)
    bench_training.add_commands(benchmarks)


def _add_slots_and_load(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument("--slots", type=positive, help="adapter slots; default: 8")
    benchmark.add_argument("--repeats", type=positive, help="default: 3")
    benchmark.add_argument("--concurrency", type=positive, help="concurrent requests; default: 8")
    benchmark.add_argument("--prompt-tokens", type=positive, help="default: 128")
    benchmark.add_argument("--generated-tokens", type=positive, help="default: 16")
    benchmark.add_argument("--model", choices=MODELS, help="model dimensions; default: tiny")


def _add_json(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")


def _add_engine_options(benchmark: argparse.ArgumentParser) -> None:
    benchmark.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    benchmark.add_argument(
        "--engine-arguments",
        type=lambda text: tuple(shlex.split(text)),
        default=(),
        metavar="TEXT",
        help="additional SGLang arguments for every engine",
    )


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
        engine_arguments=arguments.engine_arguments,
    )
    adapter_tax.run(options, recorded_command(), arguments.json, arguments.plot, say)


@failure_ends
def _affinity(arguments: argparse.Namespace) -> None:
    from bench import affinity

    options = with_given(affinity.QUICK if arguments.quick else affinity.Options(), arguments)
    affinity.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _placement(arguments: argparse.Namespace) -> None:
    from bench import placement
    from bench.simulator.policies.policies import POLICIES

    placement.run(
        placement.QUICK if arguments.quick else placement.SCENARIOS,
        POLICIES,
        arguments.placements or (1000 if arguments.quick else 20_000),
        recorded_command(),
        arguments.json,
        say,
    )


@failure_ends
def _first_token(arguments: argparse.Namespace) -> None:
    from bench.serving import first_token

    options = with_given(first_token.QUICK if arguments.quick else first_token.Options(), arguments)
    first_token.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _streams(arguments: argparse.Namespace) -> None:
    from bench.serving import streams

    options = with_given(streams.QUICK if arguments.quick else streams.Options(), arguments)
    streams.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _idle(arguments: argparse.Namespace) -> None:
    from bench.serving import idle_pair

    options = with_given(idle_pair.QUICK if arguments.quick else idle_pair.Options(), arguments)
    idle_pair.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _slots(arguments: argparse.Namespace) -> None:
    from bench import slot_swaps

    options = with_given(slot_swaps.QUICK if arguments.quick else slot_swaps.Options(), arguments)
    slot_swaps.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _catalog(arguments: argparse.Namespace) -> None:
    from bench import catalog

    catalog.run(
        arguments.revisions,
        arguments.adapters,
        arguments.database,
        recorded_command(),
        arguments.json,
        say,
    )


@failure_ends
def _cold_load(arguments: argparse.Namespace) -> None:
    from bench import cold_load

    options = with_given(cold_load.QUICK if arguments.quick else cold_load.Options(), arguments)
    cold_load.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _host_memory(arguments: argparse.Namespace) -> None:
    from bench import host_memory

    options = with_given(host_memory.QUICK if arguments.quick else host_memory.Options(), arguments)
    host_memory.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _router(arguments: argparse.Namespace) -> None:
    from bench import router_relay

    options = with_given(router_relay.QUICK if arguments.quick else router_relay.Options(), arguments)
    router_relay.run(options, arguments.sglang_router, recorded_command(), arguments.json, say)


@failure_ends
def _chaos(arguments: argparse.Namespace) -> None:
    from bench import chaos

    options = with_given(chaos.QUICK if arguments.quick else chaos.Options(), arguments)
    known_words = {"layouts": tuple(chaos.LAYOUTS), "signals": tuple(chaos.SIGNALS), "parts": chaos.Options().parts}
    for name, known in known_words.items():
        if unknown := set(getattr(options, name)) - set(known):
            option = name.replace("layouts", "layout")
            sys.exit(f"prelude: --{option}: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found = chaos.run(options, recorded_command(), arguments.json, say)
    if faults := chaos.faults(found["summary"]):
        sys.exit(f"prelude: {', '.join(faults)}")


@failure_ends
def _soak(arguments: argparse.Namespace) -> None:
    from bench import soak

    options = with_given(soak.QUICK if arguments.quick else soak.Options(), arguments)
    for name in ("minutes", "load", "kill_every_s"):
        if not 0 < getattr(options, name) < 10_000:
            sys.exit(f"prelude: --{name.removesuffix('_s').replace('_', '-')} must be positive")
    soak.run(options, recorded_command(), arguments.json, say)


@failure_ends
def _admission(arguments: argparse.Namespace) -> None:
    from bench import admission

    options = admission.Options(
        repeats=arguments.repeats or admission.Options().repeats,
        engine=not arguments.no_engine,
        only=words(arguments.only) if arguments.only else (),
    )
    admission.run(options, recorded_command(), arguments.json, say)


def _counts(text: str) -> tuple[int, ...]:
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 0,32")
    return tuple(sorted({int(word) for word in text.split(",")}))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := set(names) - set(_SYSTEMS):
        raise argparse.ArgumentTypeError(
            f"unknown system {', '.join(sorted(unknown))}; choose from {', '.join(_SYSTEMS)}"
        )
    return tuple(name for name in _SYSTEMS if name in names)
