"""Benchmark of placement alone: simulated fleets under several policies, and the CPU time of one placement.

The simulation runs the router's own placement and bookkeeping; workers and time are simulated, so equal seeds give
equal numbers on every machine. The cost is measured on this one.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.measuring.quantile import quantile
from bench.simulator.policies.fleet import WorkerModel
from bench.simulator.policies.simulation import Scenario, simulate
from bench.simulator.policies.workload import Bursts, Workload
from cluster.config.router import PlacementConfig
from cluster.control import control_pb2 as pb
from router.fleet.fleet_state import FleetState, WorkerView
from router.fleet.holders import Holders
from router.fleet.worker_loads import WorkerLoads
from router.fleet.worker_residency import WorkerResidency
from router.placement.placer import Placed, Placer
from router.placement.request import FailedAttempts, PlacementRequest, PromptSize
from router.server import spare_garbage_collection

SCENARIOS = {
    "Zipf 0.5": Scenario(Workload(zipf=0.5)),
    "Zipf 1.0": Scenario(Workload(zipf=1.0)),
    "Zipf 1.5": Scenario(Workload(zipf=1.5)),
    "hot bursts": Scenario(Workload(bursts=Bursts())),
    "4 workers lost": Scenario(Workload(), lost_workers=4),
    "rolling restart": Scenario(Workload(), restart_s=5.0),
    "little memory": Scenario(Workload(), model=WorkerModel(host_adapters=80)),
}
QUICK = {"Zipf 1.0": Scenario(Workload(10.0, 175.0, 1000), num_workers=16)}

_IN_FLIGHT = 500  # sequences, while the cost is measured
_COST_REPEATS = 5


def run(
    scenarios: dict[str, Scenario],
    policies: Sequence[str],
    num_placements: int,
    command: str,
    json_file: Path | None,
    report: Callable[[str], None],
) -> None:
    """Simulate, measure, print a line each, and write the numbers. Raises BenchError."""
    require_folders(json_file)
    # Before the simulations, which leave memory that a router does not have.
    cost = _medians([placement_cost(num_placements) for _ in range(_COST_REPEATS)])
    cold_cost = _medians([placement_cost(num_placements, are_cold=True) for _ in range(_COST_REPEATS)])
    report("one placement among {prefill_workers} x {decode_workers} workers: ".format(**cost) + _shown(cost))
    report("the same of an adapter that is resident nowhere: " + _shown(cold_cost))
    rows = []
    for scenario_name, scenario in scenarios.items():
        for policy in policies:
            result = simulate(scenario, policy)
            rows.append({"scenario": scenario_name, "policy": policy, **result.described()})
            report(
                f"{scenario_name:16} {policy:19} {result.cold_loads:6} cold loads of {result.distinct_adapters}, "
                f"queue p50 {1000 * result.queue_p50_s:6.1f} p99 {1000 * result.queue_p99_s:8.1f} ms, "
                f"balance {result.balance:.2f}"
            )
    settings = {"placements": num_placements, "cost_repeats": _COST_REPEATS}
    head = provenance.head("placement", command, settings)
    write_json({**head, "rows": rows, "cost": cost, "cold_cost": cold_cost}, json_file)


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every number; and each run's own p99."""
    found = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {**found, "runs_p99_us": [run["p99_us"] for run in runs]}


def _shown(cost: dict[str, Any]) -> str:
    each = ", ".join(f"{p99:g}" for p99 in cost["runs_p99_us"])
    text = f"p50 {cost['p50_us']} µs, p99 {cost['p99_us']} µs of CPU ({each})"
    share = 1 - cost["undisturbed_placements"] / cost["placements"]
    own = f"p50 {cost['undisturbed_p50_us']} µs, p99 {cost['undisturbed_p99_us']} µs"
    return f"{text}; {own} without the {share:.1%} of them that lost the core meanwhile or just before"


def placement_cost(
    num_placements: int,
    *,
    num_prefill: int = 64,
    num_decode: int = 256,
    num_resident: int = 100_000,
    are_cold: bool = False,
) -> dict[str, Any]:
    """Microseconds of CPU of one placement, of a sequence under a random one of the resident adapters.

    `are_cold`: under one that is resident nowhere, and that the router has not seen before, instead.

    CPU time includes what a thread pays for cold caches after it has lost its core to another process, five times a
    placement's own. `undisturbed_…` is of those during and just before which that did not happen.
    """
    random = Random(1)
    ids = [_revision_id(random) for _ in range(num_resident)]
    up = {"incarnation": "1", "is_connected": True, "is_engine_up": True, "is_ready": True}
    warm = frozenset((f"decode-{i}", "1") for i in range(num_decode))
    workers = {f"decode-{i}": WorkerView(f"decode-{i}", "decode", **up) for i in range(num_decode)}  # type: ignore[arg-type]
    holders = Holders()
    for i in range(num_prefill):
        residency = WorkerResidency(holders)
        residency.apply(pb.ResidencyDelta(snapshot=True, resident=ids[i::num_prefill]))
        name = f"prefill-{i}"
        workers[name] = WorkerView(name, "prefill", warm_pairs=warm, residency=residency, **up)  # type: ignore[arg-type]
    loads = WorkerLoads()
    for i in range(num_decode):
        loads.report(f"decode-{i}", used_kv_tokens=random.randrange(500_000), max_kv_tokens=1_000_000)
    fleet, placer, nothing = (
        FleetState(workers, loads, holders),
        Placer(PlacementConfig(), loads, random=random),
        FailedAttempts(),
    )
    requests = [
        PlacementRequest(
            _revision_id(random) if are_cold else random.choice(ids), size=PromptSize(500, 756, _blocks(random), 128.0)
        )
        for _ in range(num_placements)
    ]
    in_flight: list[Placed] = []
    seconds, num_lost = [], [_times_core_was_lost()]
    thresholds = gc.get_threshold()
    spare_garbage_collection()  # as the router does
    for request in requests:
        began_at = time.thread_time()
        request = placer.observe(request)
        placement = placer.place(request, fleet, nothing)
        seconds.append(time.thread_time() - began_at)
        assert placement is not None
        num_lost.append(_times_core_was_lost())
        in_flight.append(placer.take(request, placement))
        if len(in_flight) > _IN_FLIGHT:
            in_flight.pop(0).release()
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    # Compared with the count two placements before: the one before ends with cold caches, too.
    undisturbed = [each for i, each in enumerate(seconds) if num_lost[i + 1] == num_lost[max(0, i - 1)]] or seconds
    return {
        "prefill_workers": num_prefill,
        "decode_workers": num_decode,
        "resident_adapters": num_resident,
        "placements": num_placements,
        "undisturbed_placements": len(undisturbed),
        **_quantiles("", seconds),
        **_quantiles("undisturbed_", undisturbed),
    }


def _times_core_was_lost() -> int:
    """How often this thread had to leave its core to another one."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def _quantiles(prefix: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}p{q}_us": round(1e6 * quantile(seconds, q / 100), 1) for q in (50, 99)}


def _revision_id(random: Random) -> str:
    return f"sha256:{random.getrandbits(256):064x}"


def _blocks(random: Random) -> tuple[int, ...]:
    return tuple(random.getrandbits(60) for _ in range(4))
