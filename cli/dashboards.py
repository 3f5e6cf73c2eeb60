"""`prelude dashboards`: Grafana dashboards and Prometheus rules, as files."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.errors import ClusterError


def add_command(commands) -> None:
    text = "Write dashboards for Grafana and rules for Prometheus (docs/observability.md)."
    command = commands.add_parser("dashboards", help=text, description=text)
    command.add_argument("--out", type=Path, default=Path("helm/files"), help="folder; default: %(default)s")
    command.add_argument(
        "--available", type=_share, default=0.999, help="share of requests that must succeed; default: %(default)s"
    )
    command.add_argument(
        "--in-time",
        type=_share,
        default=0.95,
        help="share of answers that must meet router.slo; default: %(default)s",
    )
    command.add_argument(
        "--runbooks",
        metavar="URL",
        default="docs/operations",
        help="where alerts' links to runbooks begin; default: %(default)s",
    )
    command.set_defaults(run=_write)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1, such as 0.999")
    return share


def _write(arguments: argparse.Namespace) -> None:
    from observability.generate import generated_files, write_files

    files = generated_files(arguments.available, arguments.in_time, arguments.runbooks)
    try:
        changed = write_files(arguments.out, files)
    except OSError as error:
        raise ClusterError(f"{arguments.out} cannot be written: {error}") from error
    for path in changed:
        print(path)
    print(f"{len(files)} files in {arguments.out}, {len(changed)} of them changed")
