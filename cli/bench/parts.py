"""`prelude bench catalog` and `prelude bench router`. Imports of them wait for the run."""

from __future__ import annotations

import argparse
from typing import Any

from cli.bench.arguments import add_json, numbers, positive
from cli.bench.given_options import with_given
from cli.bench.outcome import failure_ends, say
from cli.bench.recorded import recorded_command


def add_commands(benchmarks: Any) -> None:
    """Add them to `prelude bench`."""
    text = "Latency of a full catalog: resolving from the database and from memory, listing, importing."
    catalog = benchmarks.add_parser("catalog", help=text, description=text)
    catalog.add_argument("--revisions", type=positive, default=1_000_000, help="default: 1000000")
    catalog.add_argument("--adapters", type=positive, default=100_000, help="default: 100000")
    catalog.add_argument("--database", metavar="URL", help="an empty database; default: a temporary SQLite file")
    add_json(catalog)
    catalog.set_defaults(run=_catalog)
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
        "--sglang-router",
        metavar="PYTHON",
        help="an interpreter with sglang-router 0.3.2; default: this one, if it has the package",
    )
    router.add_argument(
        "--protected", action="store_true", help="also measure a router with keys, quotas and TLS together"
    )
    router.add_argument("--quick", action="store_true", help="a smoke test: 8 connections, few requests, one repeat")
    add_json(router)
    router.set_defaults(run=_router)


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
def _router(arguments: argparse.Namespace) -> None:
    from bench import router_relay

    options = with_given(router_relay.QUICK if arguments.quick else router_relay.Options(), arguments)
    router_relay.run(options, arguments.sglang_router, recorded_command(), arguments.json, say)
