"""`prelude doctor`: what this host has and lacks for serving."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.local.doctor.finding import Finding


def add_command(commands: Any) -> None:
    """Add `doctor` to the command line."""
    text = "Check this host: driver, GPUs, RDMA, memory, resource limits, ports, SGLang and the hooks."
    command = commands.add_parser("doctor", help=text, description=f"{text} Exits with 1 if something is wrong.")
    command.set_defaults(run=_doctor)
    command.add_argument(
        "--config", type=Path, help="check against this cluster.yaml; default: ./cluster.yaml, if it exists"
    )
    command.add_argument("--quick", action="store_true", help="do not import SGLang and NIXL")
    command.add_argument("--json", action="store_true", help="print JSON")


def _doctor(arguments: argparse.Namespace) -> None:
    from cluster.local.doctor.report import examine

    findings = examine(arguments.config, quick=arguments.quick)
    count = Counter(str(each.level) for each in findings)
    if arguments.json:
        levels = {level: count[level] for level in ("ok", "warning", "error")}
        print(json.dumps({"findings": [asdict(each) for each in findings], **levels}, indent=1))
    else:
        print("\n".join(map(_line, findings)))
        print(f"{count['ok']} ok, warnings: {count['warning']}, errors: {count['error']}")
    sys.exit(1 if count["error"] else 0)


def _line(finding: Finding) -> str:
    remedy = f"\n{'':<18}-> {finding.remedy}" if finding.remedy else ""
    return f"{finding.level:<8}{finding.topic:<10}{finding.text}{remedy}"
