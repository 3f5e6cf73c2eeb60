"""`prelude top`: the fleet as one router sees it, on a terminal, drawn again and again.

From the router's admin listener: the console's state, and metrics. Rates are of the last half minute.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from cli.bench.arguments import positive_float
from cluster.errors import ClusterError

_WINDOW_S = 30.0
_REDRAW = "\x1b[H\x1b[J"  # over the last frame
_HEAD = ("WORKER", "ROLE", "STATE", "SEQS", "QUEUED", "WAIT", "KV", "HOST", "DISK", "LOAD")
_ROW = "{:<17} {:<7.7} {:<9.9} {:>5.5} {:>8.8} {:>7.7} {:>4.4} {:>5.5} {:>5.5} {:>4.4}"
_WRONG_ANSWERS = (OSError, HTTPException, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
_ROLES = ("prefill", "decode", "unified")
_REQUESTS = "prelude_router_requests_total"
_LATENCIES = {"TTFT": "gen_ai_server_time_to_first_token", "TPOT": "gen_ai_server_time_per_output_token"}


@dataclass(frozen=True, slots=True)
class _Sample:
    """What a router says at one time."""

    at_s: float
    state: dict[str, Any]  # as the console gets it
    counts: Counter[tuple[str, str]]  # by metric and label


def add_command(commands: Any) -> None:
    """Add `top` to the command line."""
    text = "Show workers, requests and latencies of a running cluster, again and again until Ctrl-C."
    command = commands.add_parser("top", help=text, description=text)
    command.add_argument("--config", type=Path, default=Path("cluster.yaml"), help="default: ./cluster.yaml")
    command.add_argument("--url", help="of a router's admin listener; default: that of cluster.yaml")
    command.add_argument("--interval", type=positive_float, default=2.0, metavar="SECONDS", help="default: 2")
    command.add_argument("--once", action="store_true", help="print once, after an interval, as without a terminal")
    command.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> None:
    url = (arguments.url or _configured(arguments.config)).rstrip("/")
    is_live = sys.stdout.isatty() and not arguments.once
    samples: list[_Sample] = []
    with suppress(KeyboardInterrupt):
        while True:
            try:
                newest = _sample(url)
                lines = [_printable(line)[:80] for line in _frame([*samples, newest])]
                samples = [each for each in samples if newest.at_s - each.at_s < _WINDOW_S] + [newest]
            except _WRONG_ANSWERS as error:
                if not (is_live and samples):
                    reason = f"{_printable(str(error))[:200]}; --url takes a router's admin listener"
                    raise ClusterError(f"{url} tells nothing of a router: {reason}") from error
                lines = [f"{url} does not answer"]  # until it does again
            if is_live:
                size = shutil.get_terminal_size()
                print(_REDRAW + "\n".join(line[: size.columns] for line in lines[: size.lines - 1]), flush=True)
            elif len(samples) > 1:
                print("\n".join(lines))
                return
            time.sleep(arguments.interval)


def _configured(path: Path) -> str:
    """The URL of the admin listener of a cluster."""
    from cluster.config.load import load_cluster_config
    from cluster.local.running import with_running_ports
    from process.addresses import host_and_port

    router = with_running_ports(load_cluster_config(path), path).router
    return f"http://{host_and_port(router.admin.host, router.admin_port)}"


def _sample(url: str) -> _Sample:
    from prometheus_client.parser import text_string_to_metric_families

    state, counts = json.loads(_got(f"{url}/console/state")), Counter[tuple[str, str]]()
    for family in text_string_to_metric_families(_got(f"{url}/metrics").decode()):
        for sample in family.samples:
            if sample.name == _REQUESTS:
                counts[sample.name, "failed" if sample.labels["status"] >= "500" else "answered"] += int(sample.value)
            elif sample.name.endswith("_bucket"):
                counts[sample.name, sample.labels["le"]] += int(sample.value)
    return _Sample(time.monotonic(), state, counts)


def _got(url: str) -> bytes:
    with build_opener(ProxyHandler({})).open(url, timeout=5.0) as answer:
        return answer.read(32 << 20)


def _frame(samples: Sequence[_Sample]) -> Iterator[str]:
    """Lines of at most 80 characters, of the newest sample and what has changed since the oldest one of its process."""
    last = samples[-1]
    state, counts = last.state, Counter(last.counts)
    first = next(each for each in samples if each.state["router"] == state["router"])
    counts.subtract(first.counts)
    answered, failed = (counts[_REQUESTS, kind] / (last.at_s - first.at_s or 1.0) for kind in ("answered", "failed"))
    tokens = (state["tokens"] - first.state["tokens"]) / (state["at_s"] - first.state["at_s"] or 1.0)
    yield "{num_placeable} of {num_workers} workers take requests, {num_requests} in flight   {model}".format(**state)
    yield f"requests/s {answered:.1f}   failed/s {failed:.1f}   tokens/s {tokens:.1f}"
    found = ([name, *(_quantile(each, metric, counts) for each in (0.5, 0.95))] for name, metric in _LATENCIES.items())
    yield "   ".join("{} p50 {} p95 {}".format(*each) for each in found)
    yield _ROW.format(*_HEAD)
    sequences = [(each, request["revision"]) for request in state["requests"] for each in request["sequences"]]
    loads = {(each["prefill"], revision) for each, revision in sequences if each["phase"] == "ensuring_adapter"}
    loading = Counter(worker for worker, _ in loads)  # several requests may wait for one load
    for each in sorted(state["workers"], key=lambda each: (_ROLES.index(each["role"]), each["name"])):
        kv = "-" if each["kv_used"] is None else f"{each['kv_used']:.0%}"
        queued, wait = f"{each['queued_prompt_tokens']:,.0f}", _time(each["queue_s"] or 0)
        adapters = [each["num_in_host_memory"], each["num_on_disk"], loading[each["name"]]]
        if each["role"] == "decode":  # it reads no prompt
            queued, wait, adapters = "-", "-", ["-"] * 3
        cells = each["name"][-17:], each["role"], each["condition"], each["sequences"], queued, wait, kv, *adapters
        yield _ROW.format(*map(str, cells))


def _time(duration_s: float) -> str:
    return f"{1000 * duration_s:.0f} ms" if duration_s < 1 else f"{duration_s:,.1f} s"


def _quantile(share: float, metric: str, counts: Counter[tuple[str, str]]) -> str:
    """Of a histogram, as Prometheus does: linear inside a bucket."""
    series = f"{metric}_seconds_bucket"
    buckets = sorted((float(bound), number) for (name, bound), number in counts.items() if name == series)
    wanted, low, below = share * buckets[-1][1] if buckets else 0.0, 0.0, 0
    for bound, number in buckets:
        if number >= wanted > 0:
            return _time(low if bound == math.inf else low + (bound - low) * (wanted - below) / (number - below))
        low, below = bound, number
    return "-"


def _printable(text: str) -> str:
    """Without control characters, which would be commands to the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
