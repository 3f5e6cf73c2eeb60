"""`prelude bench …`: every benchmark prints its numbers and writes them with `--json FILE`."""

from __future__ import annotations

from typing import Any

from cli.bench import goodput, load, matrix, router, simulate


def add_commands(commands: Any) -> None:
    """Add `bench` and the benchmarks to the command line."""
    text = "Run a benchmark on this machine."
    group = commands.add_parser("bench", help=text, description=text)
    benchmarks = group.add_subparsers(required=True, metavar="benchmark")
    load.add_command(benchmarks)
    matrix.add_command(benchmarks)
    goodput.add_command(benchmarks)
    router.add_command(benchmarks)
    simulate.add_command(benchmarks)
