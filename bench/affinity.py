"""Affinity on real engines: equal workers whose host memory holds a part of the adapters, under two policies.

Unified workers behind one router serve more adapters than any of them can hold. The load is the same for both policies:
adapters by a Zipf law, a fixed number of concurrent streams. Cold loads are counted by the router.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import tempfile
from bisect import bisect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from adapters.errors import AdapterError
from bench.errors import SystemFailed
from bench.load.options import Endpoint
from bench.load.strict import closed_load, requests_per_s
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.measuring.quantile import quantile
from bench.systems.imported_adapters import import_random_adapters
from bench.workloads.session import Session
from bench.workloads.workload import Stream, Workload
from cluster.config.router import PlacementConfig, ScorerWeights
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.demo import make_model
from cluster.local.supervisor import local_cluster

_TIMEOUT = aiohttp.ClientTimeout(total=300)
_VOCABULARY = 600
_LOADED = re.compile(r'^prelude_router_ensured_adapters_total\{outcome="loaded"\} ([0-9.]+)', re.MULTILINE)

POLICIES = {
    "affinity": PlacementConfig(),
    "fewest_in_flight": PlacementConfig(
        weights=ScorerWeights(queue=0, residency=0, home=0, prefix=0, room=0, in_flight=1)
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    num_workers: int = 4
    num_adapters: int = 200
    budget: int = 40  # adapters that fit in a worker's host memory
    zipf: float = 1.0
    num_requests: int = 1000
    concurrency: int = 8
    prompt_tokens: int = 64
    generated_tokens: int = 4
    rank: int = 16
    device: str = "cpu"  # or "cuda"
    engine_arguments: tuple[str, ...] = ()


QUICK = Options(num_workers=2, num_adapters=12, budget=5, num_requests=40, concurrency=4)


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print, write the file; returns its content. Raises BenchError."""
    require_folders(json_path)
    rows = []
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as name:
        folder = Path(name)
        try:
            config = _prepare(options, folder)
            for policy, placement in POLICIES.items():
                progress(f"{policy}: starting {options.num_workers} workers")
                chosen = config.model_copy(update={"router": config.router.model_copy(update={"placement": placement})})
                rows.append({"policy": policy, **asyncio.run(_measure(options, chosen, folder / policy))})
                progress("  " + ", ".join(f"{key} {value}" for key, value in rows[-1].items() if key != "policy"))
        except (AdapterError, StartError) as error:
            raise SystemFailed(str(error)) from error
    document = {
        **provenance.head("affinity", command, asdict(options), options.device),
        "rows": rows,
    }
    write_json(document, json_path)
    return document


def _prepare(options: Options, folder: Path) -> ClusterConfig:
    """Create the model, import the adapters, and return the cluster's configuration."""
    make_model(folder / "model", hidden=64, num_layers=4)
    config = ClusterConfig.model_validate(
        {
            "model": {"path": folder / "model", "name": "bench", "dtype": "bfloat16"},
            "engine": {
                "device": options.device,
                "max_total_tokens": 8192,
                "max_running_requests": 32,
                "extra_arguments": list(options.engine_arguments),
            },
            "router": {"port": 0},
            "workers": {"worker": {"role": "unified", "replicas": options.num_workers}},
            "adapter_limits": {"max_rank": options.rank},
            "catalog": {"url": f"sqlite:///{folder}/catalog.db"},
            "store": {"url": f"file://{folder}/store"},
        }
    )
    num_bytes = import_random_adapters(config, [f"adapter-{number}" for number in range(options.num_adapters)])
    residency = {
        "host_bytes": options.budget * num_bytes + num_bytes // 2,
        "disk_bytes": 0,  # every load comes from the store
    }
    return config.model_copy(update={"residency": config.residency.model_copy(update=residency)})


def adapters_of(options: Options) -> list[int]:
    """The adapter of each request; the same for every policy."""
    random = Random(1)
    shares = list(itertools.accumulate((rank + 1) ** -options.zipf for rank in range(options.num_adapters)))
    return [bisect(shares, random.random() * shares[-1]) for _ in range(options.num_requests)]


async def _measure(options: Options, config: ClusterConfig, folder: Path) -> dict[str, Any]:
    adapters = adapters_of(options)
    prompts = Stream(Workload("affinity", "", "", vocabulary=_VOCABULARY), 0, 0)
    sessions = (
        Session(number, adapter, (prompts.completion(number, options.prompt_tokens, options.generated_tokens),))
        for number, adapter in enumerate(adapters)
    )
    async with local_cluster(config, folder / "logs") as cluster, aiohttp.ClientSession(timeout=_TIMEOUT) as session:
        names = tuple(f"adapter-{number}" for number in range(options.num_adapters))
        records = await closed_load(Endpoint(cluster.url, "bench", names), sessions, options.concurrency)
        async with session.get(f"{cluster.admin_url}/metrics") as answer:
            loaded = _LOADED.search(await answer.text())
    first_tokens_s = [each.ttft_s for each in records]
    distinct = len(set(adapters))
    cold_loads = int(float(loaded[1])) if loaded else 0
    return {
        "distinct_adapters": distinct,
        "cold_loads": cold_loads,
        "cold_loads_per_adapter": round(cold_loads / distinct, 3),
        "first_token_p50_ms": round(1000 * quantile(first_tokens_s, 0.5), 1),
        "first_token_p95_ms": round(1000 * quantile(first_tokens_s, 0.95), 1),
        "requests_per_s": round(requests_per_s(records), 2),
    }
