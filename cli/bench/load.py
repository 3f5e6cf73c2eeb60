"""`prelude bench load`: a load on any OpenAI-compatible endpoint.

Names are those of sglang.bench_serving and guidellm where these have one. Imports of the generator wait for the run.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import Any

from bench.errors import BenchError, OptionInvalid
from bench.load.options import ADAPTER_FIELDS, Endpoint, Load
from bench.load.summary import SLO_KEYS
from bench.workloads.catalog import WORKLOADS
from bench.workloads.lengths import FixedLengths, Phase, PhasedLengths
from bench.workloads.popularity import DISTRIBUTIONS
from bench.workloads.workload import Workload
from cli.bench.arguments import add_json, lengths, not_negative, positive, positive_float, recorded_command

MAX_SWEPT_RATE = 100_000.0
_SWEPT_SHARE = 0.99
_MAX_ADAPTERS = 10_000_000
_API_KEY = "OPENAI_API_KEY"


def add_command(benchmarks: Any) -> None:
    """Add `load` to the benchmarks."""
    text = "Send a workload to any OpenAI-compatible endpoint: latencies from the intended send times, goodput, errors."
    load = benchmarks.add_parser("load", help=text, description=text)
    load.add_argument(
        "--url", "--base-url", "--target", required=True, help="the server, such as http://127.0.0.1:8000"
    )
    load.add_argument("--model", help="default: the first one of /v1/models")
    load.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE",
        help=f"sent with every request; an API key is taken from ${_API_KEY}",
    )  # fmt: skip
    load.add_argument(
        "--extra-request-body", type=_json_object, default={}, metavar="JSON", help="fields to add to every request"
    )
    load.add_argument("--disable-ignore-eos", action="store_true", help="let answers end before the requested length")
    load.add_argument(
        "--timeout-s", type=positive_float, default=300.0, metavar="S", help="timeout of a request; default: 300"
    )

    what = load.add_argument_group("workload")
    what.add_argument("--workload", choices=WORKLOADS, default="random", help="default: random")
    what.add_argument("--seed", "--random-seed", type=not_negative, default=1, help="default: 1")
    what.add_argument(
        "--random-input-len", type=positive, metavar="TOKENS", help="prompt length of `random`; default: 1024"
    )
    what.add_argument(
        "--random-output-len", type=positive, metavar="TOKENS", help="answer length of `random`; default: 128"
    )
    what.add_argument(
        "--adapters",
        type=_adapters,
        metavar="N|NAME,…",
        help="names of adapters, or how many of those that the server lists; default: the workload's number",
    )
    what.add_argument(
        "--adapter-field",
        choices=ADAPTER_FIELDS,
        help="how a request names its adapter; `none`: send no adapter; default: detected from the server",
    )
    add_distribution(what)

    pace = load.add_argument_group("rate and amount")
    loop = pace.add_mutually_exclusive_group()
    loop.add_argument(
        "--rate", "--request-rate", type=positive_float,
        help="open loop: requests/s on average, sent at random times without waiting for answers",
    )  # fmt: skip
    loop.add_argument("--concurrency", "--max-concurrency", type=positive, help="closed loop: requests in flight")
    loop.add_argument(
        "--phases", type=_phases, metavar="P+G@RATExS,…",
        help="open loop that turns, in place of `random`'s lengths: tokens, requests/s and seconds of each phase, such "
        "as 2048+32@11x40,256+512@8x40",
    )  # fmt: skip
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
    add_json(found)
    found.add_argument(
        "--sweep", nargs="?", type=positive_float, const=_SWEPT_SHARE, metavar="SHARE",
        help="find the highest rate, starting at --rate, at which this share of the requests meets every objective of "
        f"--goodput; default: {_SWEPT_SHARE}",
    )  # fmt: skip
    load.set_defaults(run=_run)


def add_distribution(parser: Any) -> None:
    """Add the option that chooses which adapters requests use."""
    parser.add_argument(
        "--lora-request-distribution",
        "--adapter-distribution",
        choices=DISTRIBUTIONS,
        help="popularity of the adapters; default: the workload's, for `random` round-robin",
    )


def _run(arguments: argparse.Namespace) -> None:
    from bench.load.run import run, run_sweep
    from bench.load.sweep import Sweep

    num_warm_up = arguments.warmup_requests
    common: dict[str, Any] = {
        "num_warm_up": WORKLOADS[arguments.workload].warm_up if num_warm_up is None else num_warm_up,
        "slo_ms": objectives(arguments.goodput),
        "json_path": arguments.json,
        "command": recorded_command(),
    }
    if arguments.sweep is not None:
        first_rate = arguments.rate or 1.0
        run_sweep(load_of(arguments, first_rate), Sweep(first_rate, arguments.sweep, max_rate=MAX_SWEPT_RATE), **common)
    elif not run(load_of(arguments), **common)["summary"]["num_good"]:
        raise BenchError("every request failed")


def load_of(arguments: argparse.Namespace, rate: float | None = None) -> Load:
    """The load that the command line asks for; `rate` in place of its own. Raises BenchError."""
    if arguments.phases is not None:
        return _turning(arguments, arguments.phases)
    workload = _workload(arguments, WORKLOADS[arguments.workload])
    rate = arguments.rate if rate is None else rate
    is_paced = rate is not None or arguments.concurrency is not None
    count = arguments.num_requests
    if count is None and arguments.duration_s is None and arguments.sweep is None:
        count = workload.num_requests
    requests_per_s = rate if is_paced else workload.requests_per_s
    return Load(
        endpoint=_endpoint(arguments, workload),
        workload=workload,
        seed=arguments.seed,
        num_requests=count,
        duration_s=arguments.duration_s,
        requests_per_s=requests_per_s,
        concurrency=arguments.concurrency if is_paced else workload.concurrency,
        processes=arguments.processes or 0,
    )


def _turning(arguments: argparse.Namespace, phases: tuple[Phase, ...]) -> Load:
    """A load with phases. Raises BenchError."""
    said_by_phases = ("random_input_len", "random_output_len", "num_requests", "duration_s", "sweep")
    if given := [name for name in said_by_phases if getattr(arguments, name) is not None]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise OptionInvalid(f"--phases has lengths, rates and durations of its own; leave out {options}")
    if arguments.workload != "random":
        raise OptionInvalid(f"--phases: the lengths of {arguments.workload} are fixed; use --workload random")
    workload = replace(_workload(arguments, WORKLOADS["random"]), lengths=PhasedLengths(phases))
    count = sum(each.num_requests for each in phases)
    return Load(
        endpoint=_endpoint(arguments, workload),
        workload=workload,
        seed=arguments.seed,
        num_requests=count,
        requests_per_s=count / sum(each.duration_s for each in phases),
        processes=arguments.processes or 0,
    )


def _workload(arguments: argparse.Namespace, workload: Workload) -> Workload:
    prompt, output = arguments.random_input_len, arguments.random_output_len
    if prompt is not None or output is not None:
        if arguments.workload != "random":
            raise OptionInvalid(f"--random-…: the lengths of {arguments.workload} are fixed; use --workload random")
        workload = replace(workload, lengths=FixedLengths(prompt or 1024, output or 128))
    if (distribution := arguments.lora_request_distribution) is None:
        return workload
    popularity = workload.popularity.chosen(distribution)
    return replace(workload, popularity=popularity, text=f"{workload.text} Its adapters here: {popularity}.")


def _endpoint(arguments: argparse.Namespace, workload: Workload) -> Endpoint:
    if not arguments.url.startswith(("http://", "https://")):
        raise OptionInvalid(f"--url {arguments.url}: it begins with http:// or https://")
    if "@" in arguments.url.split("//", 1)[1].split("/", 1)[0]:
        raise OptionInvalid("--url has a password in it, which results would show; use --header")
    asked = workload.num_adapters if arguments.adapters is None else arguments.adapters
    names = tuple(f"a{number}" for number in range(asked)) if isinstance(asked, int) else asked
    if not names and arguments.lora_request_distribution:
        raise OptionInvalid("--lora-request-distribution: there are no adapters; --adapters has them")
    headers = {}
    for header in arguments.header:
        name, equals, value = header.partition("=")
        if not equals or not name.strip():
            raise OptionInvalid("--header: NAME=VALUE is expected")
        headers[name.strip()] = value
    has_authorization = any(name.lower() == "authorization" for name in headers)  # what is said goes before what is set
    if (key := os.environ.get(_API_KEY)) and not has_authorization:
        headers["authorization"] = f"Bearer {key}"
    return Endpoint(
        url=arguments.url.rstrip("/").removesuffix("/v1"),
        model=arguments.model or "",
        adapters=names,
        takes_served=isinstance(asked, int),
        adapter_field=arguments.adapter_field or ("" if names else "adapter"),
        headers=headers,
        extra_body=arguments.extra_request_body,
        timeout_s=arguments.timeout_s,
        ignore_eos=not arguments.disable_ignore_eos,
    )


def objectives(given: list[tuple[str, float]]) -> dict[str, float]:
    """By key. Raises BenchError for one that is given twice."""
    found = dict(given)
    if len(found) < len(given):
        raise OptionInvalid(f"--goodput {' '.join(f'{key}:{limit:g}' for key, limit in given)}: one limit for each key")
    return found


def _phases(text: str) -> tuple[Phase, ...]:
    """P+G@RATExS, separated by commas. Raises argparse.ArgumentTypeError."""
    phases = []
    for word in text.split(","):
        shape, _, pace = word.partition("@")
        rate, _, duration = pace.partition("x")
        try:
            phases.append(Phase(*lengths(shape), positive_float(rate), positive_float(duration)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{word!r} is no phase, such as 2048+32@11x40: {error}") from error
    return tuple(phases)


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
