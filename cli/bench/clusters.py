"""Benchmarks of the catalog, the router, and of whole clusters. Imports of them wait for the run."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cli.bench.arguments import add_json, counts, numbers, positive, words
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
    add_json(router)
    router.set_defaults(run=_router)
    text = "Kill and stop processes of a real cluster: what clients see, how fast it recovers, what is left behind."
    chaos = benchmarks.add_parser("chaos", help=text, description=text)
    chaos.add_argument(
        "--layout",
        type=words,
        dest="layouts",
        metavar="LAYOUTS",
        help="pair, pairs (two of each role) or unified (two workers), or several, separated by commas; default: pair",
    )
    chaos.add_argument("--in-flight", type=counts, help="requests at the time of the signal; default: 0,32")
    chaos.add_argument("--signals", type=words, help="default: kill,stop")
    chaos.add_argument("--parts", type=words, help="default: router,agent,server,scheduler,detokenizer")
    chaos.add_argument("--quick", action="store_true", help="a smoke test: one kill of one scheduler")
    add_json(chaos)
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
    add_json(soak)
    soak.set_defaults(run=_soak)


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
