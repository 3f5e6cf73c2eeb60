"""Write the measured tables of the pages from bench/results/: `python -m bench.evidence`.

A page marks the place of a table with the comments `<!-- table NAME -->` and `<!-- end -->`; what stands between them
is generated. Tables hold numbers only: what they mean, and what they do not show, is the page's own text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

from bench.evidence import (
    adapter_tax,
    cold_adapters,
    failures,
    pairs,
    positions,
    request_path,
    simulated,
    sweep,
    training,
)
from bench.evidence.cells import RESULTS, ROOT, wrapped
from bench.matrix.report import published
from bench.measuring.result_file import ResultFile

__all__ = ["PAGES", "PLOTS", "RESULTS", "ROOT", "TABLES", "main", "rendered", "tables_in"]

PAGES = (
    "README.md",
    "docs/evidence.md",
    "docs/placement.md",
    "docs/positions.md",
    "docs/simulator.md",
    "docs/training.md",
    "bench/results/README.md",
)

_BLOCK = re.compile(r"<!-- table ([a-z0-9-]+) -->\n.*?<!-- end -->", re.DOTALL)


def main() -> None:
    """Rewrite the pages and plots, and name those that changed."""
    pages = {name: rendered((ROOT / name).read_text()) for name in PAGES}
    for name, after in (pages | {name: draw() for name, draw in PLOTS.items()}).items():
        path = ROOT / name
        if not path.exists() or path.read_text() != after:
            path.write_text(after)
            print(f"{name} updated", file=sys.stderr)


def rendered(page: str) -> str:
    """The page with every table as the results give it. Raises KeyError for a table that nothing generates."""
    return _BLOCK.sub(lambda match: f"<!-- table {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->", page)


def tables_in(page: str) -> list[str]:
    """The names of a page's tables."""
    return [match[1] for match in _BLOCK.finditer(page)]


def _sources() -> str:
    lines = ["```sh"]
    for file in map(ResultFile, sorted(RESULTS.glob("*.json"))):
        lines += [f"# {file.path.name}: {file.machine}, commit {file.commit}", wrapped(file.command), ""]
    return "\n".join((*lines[:-1], "```"))


PLOTS: dict[str, Callable[[], str]] = {
    "docs/images/matrix-sweep.svg": sweep.plot,
    "docs/images/positions.svg": positions.chart,
}

TABLES: dict[str, Callable[[], str]] = {
    "speed": adapter_tax.speed,
    "h200-requests": adapter_tax.h200_requests,
    "h200-ratios": adapter_tax.h200_ratios,
    "h200-latencies": adapter_tax.h200_latencies,
    "h200-repeated": adapter_tax.h200_repeated,
    "h200-rank1": adapter_tax.h200_rank1,
    "h200-history": adapter_tax.h200_history,
    "all-shares": adapter_tax.all_shares,
    "long-prompts": adapter_tax.long_prompts,
    "shrink": adapter_tax.shrink,
    "prompt-profile": adapter_tax.prompt_profile,
    "graph-segments": adapter_tax.graph_segments,
    "cpu-requests": adapter_tax.cpu_requests,
    "cpu-ratios": adapter_tax.cpu_ratios,
    "cold-loads": cold_adapters.cold_loads,
    "punica": cold_adapters.punica,
    "pioneer-h200": cold_adapters.pioneer_h200,
    "pioneer-pair": cold_adapters.pioneer_pair,
    "slots": cold_adapters.slots,
    "pair-speed": pairs.pair_speed,
    "two-gpus": pairs.two_gpus,
    "early-sends": pairs.early_sends,
    "chat": pairs.chat,
    "kv-pages": pairs.kv_pages,
    "pages-under-load": pairs.pages_under_load,
    "pair-goodput": pairs.goodput,
    "one-machine-goodput": pairs.goodput_on_one_machine,
    "idle": pairs.idle,
    "one-gpu-goodput": pairs.goodput_of_one_gpu,
    "pair-first-tokens": pairs.first_tokens,
    "streams": pairs.streams,
    "kv-transfers": pairs.kv_transfers,
    "host-memory-h200": cold_adapters.host_memory_h200,
    "catalog": cold_adapters.catalog,
    "placement": request_path.placement_scenarios,
    "placement-cost": request_path.placement_cost,
    "simulated": simulated.source,
    "simulated-gpus": simulated.gpus,
    "simulated-slots": simulated.slots,
    "simulated-rack": simulated.rack,
    "simulated-ratios": simulated.ratios,
    "simulated-decode-reads": simulated.decode_reads,
    "simulated-roles": simulated.roles,
    "simulated-scale": simulated.scale,
    "simulated-measured": simulated.measured,
    "validated": simulated.validated,
    "affinity": request_path.affinity,
    "no-cliff": sweep.table,
    "sweep-repeats": sweep.repeats,
    "matrix": lambda: published(RESULTS / "matrix-cpu.json"),
    "matrix-sweep": lambda: published(RESULTS / "matrix-sweep-cpu.json"),
    "router-cpu": request_path.router_cpu,
    "router": request_path.router,
    "router-host": request_path.router_host,
    "protected": request_path.protected,
    "admission": request_path.admission,
    "chaos": failures.chaos,
    "chaos-pairs": lambda: failures.chaos(RESULTS / "chaos-pairs-cpu.json"),
    "chaos-unified-stop": lambda: failures.chaos(RESULTS / "chaos-unified-stop-cpu.json"),
    "soak": failures.soak,
    "training-h200": training.training_h200,
    "training-sft": training.training_sft,
    "training-memory": training.training_memory,
    "training-cpu": training.training_cpu,
    "rank-transfer": training.rank_transfer,
    "positions": positions.exact,
    "positions-lengths": positions.lengths,
    "positions-rates": positions.rates,
    "sources": _sources,
}
