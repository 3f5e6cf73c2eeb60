"""`prelude bench load`: a load on any OpenAI-compatible endpoint.

Names are those of sglang.bench_serving and guidellm where these have one. Imports of the generator wait for the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.bench.arguments import (
    given_options,
    not_negative,
    not_negative_float,
    positive,
    positive_float,
    recorded_command,
)

if TYPE_CHECKING:
    from bench.load.options import Endpoint, Load
    from bench.workloads.workload import Workload

# Copies, since `prelude --help` should not import the generator; a test compares them.
WORKLOADS = (
    "random", "punica", "pioneer", "pioneer-zipf", "mint-warm", "mint-cold",
    "mint-mixed", "databricks-prefill", "databricks-decode", "chat", "agent",
)  # fmt: skip
DISTRIBUTIONS = ("identical", "uniform", "zipf", "skewed", "distinct", "round-robin")
ADAPTER_FIELDS = ("adapter", "model", "base:adapter", "lora_path", "none")
ARRIVALS = ("constant", "poisson", "bursts")
SLO_KEYS = ("ttft", "tpot", "e2e")
MAX_SWEPT_RATE = 100_000.0
_MAX_ADAPTERS = 10_000_000
_ADAPTER_PREFIX = "a"


def add_command(benchmarks: Any) -> None:
    """Add `load` to the benchmarks."""
    text = "Send a workload to any OpenAI-compatible endpoint: latencies from the intended send times, goodput, errors."
    load = benchmarks.add_parser("load", help=text, description=text)
    load.add_argument("--url", "--base-url", "--target", help="the server, such as http://127.0.0.1:8000")
    load.add_argument("--model", help="default: the first one of /v1/models")
    load.add_argument("--header", action="append", default=[], metavar="NAME=VALUE", help="sent with every request")
    load.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="the environment variable that has the API key; default: OPENAI_API_KEY",
    )
    load.add_argument(
        "--extra-request-body", type=_json_object, default={}, metavar="JSON", help="fields to add to every request"
    )
    load.add_argument("--disable-ignore-eos", action="store_true", help="let answers end before the requested length")
    load.add_argument(
        "--ready-timeout-s",
        type=not_negative_float,
        default=0.0,
        metavar="S",
        help="wait until the server generates; default: 0",
    )
    load.add_argument(
        "--timeout-s", type=positive_float, default=300.0, metavar="S", help="timeout of a request; default: 300"
    )

    what = load.add_argument_group("workload")
    what.add_argument("--workload", choices=WORKLOADS, default="random", help="default: random")
    what.add_argument(
        "--list-workloads", action="store_true", help="describe the workloads with their sources, and exit"
    )
    what.add_argument("--seed", "--random-seed", type=not_negative, default=1, help="default: 1")
    what.add_argument(
        "--random-input-len", type=positive, metavar="TOKENS", help="prompt length of `random`; default: 1024"
    )
    what.add_argument(
        "--random-output-len", type=positive, metavar="TOKENS", help="answer length of `random`; default: 128"
    )
    what.add_argument(
        "--random-range-ratio",
        type=positive_float,
        metavar="RATIO",
        help="for `random`: lengths are uniform from RATIO times these; default: 1",
    )
    what.add_argument("--vocabulary", type=positive, help="random prompts use token ids below this; default: 500")
    what.add_argument(
        "--adapters",
        type=_adapters,
        metavar="N|NAME,…",
        help="names of adapters, or their number; default: the workload's number",
    )
    what.add_argument("--lora-name", nargs="+", metavar="NAME", help="adapters, as sglang.bench_serving takes them")
    what.add_argument(
        "--adapter-prefix", default=_ADAPTER_PREFIX, metavar="TEXT", help="N adapters are called a0, a1, …; default: a"
    )
    what.add_argument(
        "--adapter-field",
        choices=ADAPTER_FIELDS,
        help="how a request names its adapter; `none`: send no adapter; default: detected from the server",
    )
    add_popularity(what)

    pace = load.add_argument_group("rate and amount")
    pace.add_argument(
        "--rate", "--request-rate", type=positive_float, help="open loop: requests/s, sent without waiting for answers"
    )
    pace.add_argument("--rate-type", choices=ARRIVALS, help="arrivals of the open loop; default: poisson")
    pace.add_argument(
        "--concurrency", "--max-concurrency", type=positive, help="closed loop; with --rate, the maximum in flight"
    )
    pace.add_argument(
        "--num-requests", "--num-prompts", "--max-requests", type=positive, help="default: the workload's"
    )
    pace.add_argument(
        "--duration-s", "--max-seconds", type=positive_float, metavar="S",
        help="duration of the load; in a sweep, of each rate (default: at least 30)",
    )  # fmt: skip
    pace.add_argument("--warmup-requests", type=not_negative, help="sent first and discarded; default: the workload's")
    pace.add_argument(
        "--processes", type=positive, help="processes of the generator; default: as many as the rate needs"
    )

    found = load.add_argument_group("results")
    found.add_argument(
        "--goodput", nargs="+", type=objective, default=[], metavar="KEY:MS",
        help=f"objectives: {', '.join(SLO_KEYS)} in ms, such as ttft:500 tpot:50",
    )  # fmt: skip
    found.add_argument("--json", type=Path, metavar="FILE", help="write everything, each request included")
    found.add_argument(
        "--sweep", action="store_true", help="find the highest rate that meets --goodput, starting at --rate"
    )
    found.add_argument(
        "--sweep-share", type=positive_float, default=0.99, metavar="SHARE",
        help="share of requests that must meet every objective; default: 0.99",
    )  # fmt: skip
    found.add_argument(
        "--sweep-precision", type=positive_float, default=0.05, metavar="SHARE",
        help="stop when a failing rate is within this share of the result; default: 0.05",
    )  # fmt: skip
    load.set_defaults(run=partial(_run, load))


def add_popularity(parser: Any) -> None:
    """Add the options that choose which adapters requests use."""
    parser.add_argument(
        "--lora-request-distribution",
        "--adapter-distribution",
        choices=DISTRIBUTIONS,
        help="popularity of the adapters; default: the workload's, for `random` round-robin",
    )
    parser.add_argument(
        "--lora-zipf-alpha", type=positive_float, help="exponent for `zipf` and `skewed`; default: the workload's"
    )


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from bench.errors import BenchError
    from bench.load.run import run, run_sweep
    from bench.load.sweep import Sweep
    from bench.workloads.catalog import WORKLOADS as CATALOG

    if arguments.list_workloads:
        for workload in CATALOG.values():
            print(f"{workload.name}\n  {workload.text}\n  Source: {workload.source}")
        return
    try:
        if not arguments.sweep:
            _refuse_unused(given_options(parser, arguments))
        common: dict[str, Any] = {
            "num_warm_up": _warm_up(arguments, CATALOG[arguments.workload]),
            "slo_ms": _objectives(arguments.goodput),
            "json_path": arguments.json,
            "command": recorded_command(),
            "ready_timeout_s": arguments.ready_timeout_s,
        }
        if arguments.sweep:
            first_rate = arguments.rate or 1.0
            sweep = Sweep(first_rate, arguments.sweep_share, arguments.sweep_precision, MAX_SWEPT_RATE)
            run_sweep(load_of(arguments, first_rate), sweep, **common)
            return
        found = run(load_of(arguments), **common)
    except BenchError as error:
        sys.exit(f"prelude: {error}")
    if not found["summary"]["num_good"]:
        sys.exit("prelude: every request failed")


def load_of(arguments: argparse.Namespace, rate: float | None = None) -> Load:
    """The load that the command line asks for; `rate` in place of its own. Raises BenchError."""
    from bench.load.options import Load
    from bench.workloads.catalog import workload_named

    workload = _workload(arguments, workload_named(arguments.workload))
    rate = arguments.rate if rate is None else rate
    is_paced = rate is not None or arguments.concurrency is not None
    count = arguments.num_requests
    if count is None and arguments.duration_s is None and not arguments.sweep:
        count = workload.num_requests
    requests_per_s = rate if is_paced else workload.requests_per_s
    arrivals = arguments.rate_type or workload.arrivals
    _refuse_pacing_without_effect(arguments, requests_per_s)
    return Load(
        endpoint=_endpoint(arguments, workload),
        workload=workload,
        seed=arguments.seed,
        num_requests=count,
        duration_s=arguments.duration_s,
        requests_per_s=requests_per_s,
        arrivals=arrivals,
        concurrency=arguments.concurrency if is_paced else workload.concurrency,
        processes=arguments.processes or 0,
    )


def _workload(arguments: argparse.Namespace, workload: Workload) -> Workload:
    from bench.errors import BenchError
    from bench.workloads.lengths import FixedLengths

    if arguments.vocabulary is not None:
        if workload.conversation:
            raise BenchError(f"--vocabulary: the prompts of {workload.name} are text")
        workload = replace(workload, vocabulary=arguments.vocabulary)
    given = (arguments.random_input_len, arguments.random_output_len, arguments.random_range_ratio)
    if any(each is not None for each in given):
        if arguments.workload != "random":
            raise BenchError(f"--random-…: the lengths of {arguments.workload} are fixed; use --workload random")
        ratio = given[2] or 1.0
        if ratio > 1:
            raise BenchError(f"--random-range-ratio {ratio:g}: at most 1")
        workload = replace(workload, lengths=FixedLengths(given[0] or 1024, given[1] or 128, ratio))
    chosen = workload.popularity.chosen(arguments.lora_request_distribution, arguments.lora_zipf_alpha)
    return replace(workload, popularity=chosen)


def _endpoint(arguments: argparse.Namespace, workload: Workload) -> Endpoint:
    from bench.errors import BenchError
    from bench.load.options import Endpoint

    if not arguments.url:
        raise BenchError("--url is missing: the server's address, such as http://127.0.0.1:8000")
    if not arguments.url.startswith(("http://", "https://")):
        raise BenchError(f"--url {arguments.url}: it begins with http:// or https://")
    if "@" in arguments.url.split("//", 1)[1].split("/", 1)[0]:
        raise BenchError("--url has a password in it, which results would show; use --header")
    if arguments.lora_name and arguments.adapters is not None:
        raise BenchError("--adapters and --lora-name are the same; give one of them")
    asked = tuple(arguments.lora_name) if arguments.lora_name else arguments.adapters
    if asked is None:
        asked = workload.num_adapters
    names = tuple(f"{arguments.adapter_prefix}{n}" for n in range(asked)) if isinstance(asked, int) else asked
    if not names and (arguments.lora_request_distribution or arguments.lora_zipf_alpha):
        raise BenchError("--lora-request-distribution: there are no adapters; --adapters or --lora-name has them")
    if not isinstance(asked, int) and arguments.adapter_prefix != _ADAPTER_PREFIX:
        raise BenchError("--adapter-prefix: the adapters have names; it is for --adapters N")
    headers = {}
    for header in arguments.header:
        name, equals, value = header.partition("=")
        if not equals or not name.strip():
            raise BenchError("--header: NAME=VALUE is expected")
        headers[name.strip()] = value
    has_authorization = any(name.lower() == "authorization" for name in headers)  # what is said goes before what is set
    if (key := os.environ.get(arguments.api_key_env)) and not has_authorization:
        headers["authorization"] = f"Bearer {key}"
    return Endpoint(
        url=arguments.url.rstrip("/").removesuffix("/v1"),
        model=arguments.model or "",
        adapters=names,
        adapter_field=arguments.adapter_field or ("" if names else "adapter"),
        headers=headers,
        extra_body=arguments.extra_request_body,
        timeout_s=arguments.timeout_s,
        ignore_eos=not arguments.disable_ignore_eos,
    )


def _objectives(given: list[tuple[str, float]]) -> dict[str, float]:
    """By key. Raises BenchError for one that is given twice."""
    from bench.errors import BenchError

    found = dict(given)
    if len(found) < len(given):
        raise BenchError(f"--goodput {' '.join(f'{key}:{limit:g}' for key, limit in given)}: one limit for each key")
    return found


def _refuse_unused(given: list[str]) -> None:
    """Raises BenchError for options of a sweep where there is none."""
    from bench.errors import BenchError

    if unused := [f"--{name.replace('_', '-')}" for name in given if name in ("sweep_share", "sweep_precision")]:
        raise BenchError(f"{', '.join(unused)} without --sweep: there is no search that it could end")


def _refuse_pacing_without_effect(arguments: argparse.Namespace, rate: float | None) -> None:
    """Raises BenchError for an option of a pace that this load does not have."""
    from bench.errors import BenchError

    if rate is None and arguments.rate_type is not None:
        raise BenchError(
            "--rate-type: this is a closed loop, whose requests follow answers; --rate makes it an open one"
        )


def _warm_up(arguments: argparse.Namespace, workload: Workload) -> int:
    return workload.warm_up if arguments.warmup_requests is None else arguments.warmup_requests


def _adapters(text: str) -> int | tuple[str, ...]:
    if text.isdecimal():
        if int(text) > _MAX_ADAPTERS:
            raise argparse.ArgumentTypeError(f"{text} adapters: at most {_MAX_ADAPTERS}")
        return int(text)
    names = tuple(text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names


def objective(text: str) -> tuple[str, float]:
    """KEY:MS. Raises argparse.ArgumentTypeError."""
    key, _, limit = text.partition(":")
    try:
        limit_ms = float(limit)
    except ValueError:
        limit_ms = 0.0
    if key not in SLO_KEYS or not 0 < limit_ms < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no objective, such as ttft:500; there are {', '.join(SLO_KEYS)}")
    return key, limit_ms


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("no JSON object")
    return found
