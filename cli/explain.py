"""`prelude router explain`: asks a running router where a request would go, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from process.addresses import host_and_port

KEY_VARIABLE = "PRELUDE_API_KEY"
_TIMEOUT_S = 10.0


def add_command(commands: Any) -> None:
    """Add `explain` to the router's subcommands."""
    text = "Ask a running router where it would place a request now, and why. Nothing is placed or loaded."
    explain = commands.add_parser("explain", help=text, description=text)
    explain.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    explain.add_argument("--url", help="the router's admin listener; default: router.admin of the configuration")
    explain.add_argument(
        "--adapter", help=f"the adapter of the request; {KEY_VARIABLE} has a key that may use it, if one is needed"
    )
    explain.add_argument("--prompt-tokens", type=_tokens, metavar="N", help="default: 500")
    explain.add_argument("--answer-tokens", type=_tokens, metavar="N", help="default: 256")
    explain.add_argument("--json", action="store_true", help="print the router's JSON answer unchanged")
    explain.set_defaults(run=_explain, writes_log=False)


def _tokens(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return int(text)


def _explain(arguments: argparse.Namespace) -> None:
    names = ("adapter", "prompt_tokens", "answer_tokens")
    query = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    url = f"{arguments.url or _url(arguments.config)}/debug/placement?{urllib.parse.urlencode(query)}"
    key = os.environ.get(KEY_VARIABLE)
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"prelude: {_message_in(error.read()) or f'{url} answered {error.code}'}")
    except (OSError, ValueError) as error:  # ValueError: no URL, or no JSON
        sys.exit(f"prelude: the router at {url} cannot be asked: {getattr(error, 'reason', error)}")
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found)))


def _url(config: Path) -> str:
    from cluster.config.load import load_cluster_config
    from cluster.local.running import with_running_ports

    router = with_running_ports(load_cluster_config(config), config).router
    return f"http://{host_and_port(router.admin.host, router.admin_port)}"


def _message_in(body: bytes) -> str | None:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


def _lines(found: dict[str, Any]) -> list[str]:
    """A table: the workers that could read the prompt, the best first, with the costs of each in milliseconds."""
    what = found["revision"] or "the base model"
    lines = [f"{what}, {found['prompt_tokens']} prompt tokens: {found['placement'] or 'no worker can take it'}"]
    if found["readers"]:
        names = list(found["readers"][0]["costs_ms"])
        rows = [["worker", "home", "adapter", *names, "cost ms", "decode"]]
        for reader in found["readers"]:
            adapter = {True: "here", False: "cold", None: ""}[reader["has_adapter"]]
            costs = [f"{reader['costs_ms'][name]:g}" for name in names]
            home = str(reader["home"] or "")
            rows.append([reader["worker"], home, adapter, *costs, f"{reader['cost_ms']:g}", reader["decode"] or ""])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
    lines += [f"{name}: takes nothing now: {reason}" for name, reason in found["not_placeable"].items()]
    return lines
