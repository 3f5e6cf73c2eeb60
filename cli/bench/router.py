"""`prelude bench router`. Imports of it wait for the run."""

import argparse
from typing import Any

from cli.bench.arguments import add_json, numbers, positive, recorded_command, with_given
from cli.bench.outcome import failure_ends, say


def add_command(benchmarks: Any) -> None:
    """Add `router` to the benchmarks."""
    text = (
        "CPU time of the router per streamed event and per request, and added latency, next to SGLang's Rust gateway."
    )
    router = benchmarks.add_parser("router", help=text, description=text)
    router.add_argument("--concurrency", type=numbers, help="connections of each load; default: 32,128")
    router.add_argument("--repeats", type=positive, help="default: 3")
    router.add_argument(
        "--sglang-router",
        metavar="PYTHON",
        help="an interpreter with sglang-router 0.3.2; default: this one, if it has the package",
    )
    router.add_argument(
        "--protected", action="store_true", help="also measure a router with keys, quotas and TLS together"
    )
    add_json(router)
    router.set_defaults(run=_router)


@failure_ends
def _router(arguments: argparse.Namespace) -> None:
    from bench import router_relay

    options = with_given(router_relay.Options(), arguments)
    router_relay.run(options, arguments.sglang_router, recorded_command(), arguments.json, say)
