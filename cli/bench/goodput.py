"""`prelude bench goodput`. Engines are imported only by the run."""

import argparse
from dataclasses import replace
from typing import Any

from bench.errors import BenchError
from bench.systems.layout import Layout
from cli.bench.arguments import (
    add_engines,
    add_json,
    lengths,
    positive,
    positive_float,
    recorded_command,
    say,
    with_given,
)
from cli.bench.load import objective


def add_command(benchmarks: Any) -> None:
    """Add `goodput` to the benchmarks."""
    text = "The highest rate that each system holds within TTFT and TPOT objectives in each layout, alone on its GPUs."
    goodput = benchmarks.add_parser("goodput", help=text, description=text)
    goodput.add_argument("--systems", type=_names, help="any of none, stock, prelude; default: stock,prelude")
    goodput.add_argument(
        "--layouts", type=_layouts, metavar="LAYOUT,…",
        help="each system in each: counts of prefill (p), decode (d) and unified (u) workers, a GPU each, such as "
        "3p+1d,4u; default: 1u,1p+1d",
    )  # fmt: skip
    goodput.add_argument(
        "--shapes",
        type=_shapes,
        metavar="P+G,…",
        help="tokens of prompts and answers, such as 2048+128; default: 128+16",
    )
    goodput.add_argument(
        "--objectives", type=_objectives, action="append", metavar="KEY:MS,…",
        help="finds the best rate for each from the same probes; repeatable; default: ttft:2000,tpot:200",
    )  # fmt: skip
    goodput.add_argument("--adapters", type=positive, metavar="N", help="used in turn; default: 8")
    goodput.add_argument("--slots", type=positive, help="adapter slots of each engine; default: 8")
    goodput.add_argument(
        "--concurrency",
        type=positive,
        help="an engine's KV cache holds 5/4 of this many requests; default: 16",
    )
    goodput.add_argument(
        "--first-rate", type=_rates, dest="first_rates", metavar="R,…",
        help="requests/s that the search begins with: one rate, or one for each shape; default: 1",
    )  # fmt: skip
    goodput.add_argument(
        "--share", type=positive_float, help="of requests that must meet the objectives; default: 0.99"
    )
    goodput.add_argument(
        "--precision", type=positive_float, help="the lowest rate that fails is within this share; default: 0.05"
    )
    goodput.add_argument(
        "--duration-s", type=positive_float, dest="least_probe_s", metavar="S",
        help="of each probe; longer if that is too few requests; default: 10",
    )  # fmt: skip
    goodput.add_argument(
        "--growth", type=positive_float, metavar="X", help="factor of the rate until one fails; default: 2"
    )
    goodput.add_argument(
        "--repeats", type=positive, metavar="N", help="probes of the best rate and the next; default: 1"
    )
    goodput.add_argument(
        "--chunk-tokens", type=positive, metavar="N", help="of prompts, per prefill batch; default: 2048"
    )
    add_engines(goodput)
    add_json(goodput)
    goodput.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from bench.matrix import goodput

    options = goodput.Options()
    options = replace(options, sweep=with_given(options.sweep, arguments))
    goodput.run(with_given(options, arguments), recorded_command(), arguments.json, say)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _layouts(text: str) -> tuple[Layout, ...]:
    try:
        return tuple(Layout.parse(each) for each in text.split(","))
    except BenchError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rates(text: str) -> tuple[float, ...]:
    return tuple(positive_float(each) for each in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    return tuple(lengths(each) for each in text.split(","))


def _objectives(text: str) -> dict[str, float]:
    found = [objective(word) for word in text.split(",")]
    if len(dict(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names an objective twice")
    return dict(found)
