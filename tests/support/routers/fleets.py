"""Fleets of made-up workers, for tests of placement."""

from dataclasses import replace
from random import Random

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import FleetState, Holders, WorkerResidency, WorkerView
from router.fleet.worker_loads import WorkerLoads
from router.placement.placer import Placer
from router.placement.request import FailedAttempts, PlacementRequest, PromptSize

UP = {"is_connected": True, "is_engine_up": True, "is_ready": True}
UNREADY_CHANGES = [{"is_connected": False}, {"is_engine_up": False}, {"is_ready": False}, {"is_draining": True}]
PROMPT_TOKENS = 1000  # of each sequence that a fleet has in flight; read in 0.2 s at a new worker's rate
MAX_KV_TOKENS = 100_000
NUM_PREFILL, NUM_DECODE = 64, 256  # of the large fleet


def warm_with(worker: WorkerView, *decodes: str) -> WorkerView:
    """The worker after a warm-up with the first incarnations of decode workers."""
    return replace(worker, warm_pairs=frozenset((name, f"{name}-1") for name in decodes))


def having(worker: WorkerView, **delta: list[str]) -> WorkerView:
    """The worker with a residency of its own."""
    residency = WorkerResidency()
    residency.apply(control.ResidencyDelta(snapshot=True, **delta))
    return replace(worker, residency=residency)


def fleet_of(*workers: WorkerView, **num_sequences: int) -> FleetState:
    """A fleet with so many of this router's sequences in flight at workers, by name."""
    loads = WorkerLoads(lambda: 0.0)
    for worker in workers:
        loads[worker.name].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=MAX_KV_TOKENS)
        reads = worker.role != "decode"
        for _ in range(num_sequences.get(worker.name, 0)):
            loads.add(worker.name, prompt_tokens=PROMPT_TOKENS if reads else 0, kv_tokens=PROMPT_TOKENS)
    holders = Holders()
    for worker in workers:
        for revision_id in worker.residency.host:
            holders.add(revision_id, worker.residency)
    return FleetState({worker.name: worker for worker in workers}, loads, holders)


DECODES = tuple(WorkerView(name, "decode", incarnation=f"{name}-1", **UP) for name in ("d0", "d1"))
PREFILLS = tuple(
    warm_with(WorkerView(name, "prefill", incarnation=f"{name}-1", **UP), "d0", "d1") for name in ("p0", "p1")
)
UNIFIED = tuple(WorkerView(name, "unified", incarnation=f"{name}-1", **UP) for name in ("u0", "u1"))


def place_many(num_placements: int, *, num_resident: int, is_changing: bool = False) -> None:
    """Place one sequence after the other among 64 prefill and 256 decode workers; all stay in flight.

    `is_changing`: each change of a worker makes a new state; there is one before each placement.
    """
    random = Random(1)
    ids = [f"sha256:{random.getrandbits(256):064x}" for _ in range(num_resident)]
    warm = frozenset((f"decode-{i}", "1") for i in range(NUM_DECODE))
    holders, loads = Holders(), WorkerLoads()
    workers = {}
    for i in range(NUM_DECODE):
        workers[f"decode-{i}"] = WorkerView(f"decode-{i}", "decode", incarnation="1", **UP)
        loads[f"decode-{i}"].report(loads.clock(), used_kv_tokens=random.randrange(500_000), max_kv_tokens=1_000_000)
    for i in range(NUM_PREFILL):
        residency = WorkerResidency(holders)
        residency.apply(control.ResidencyDelta(snapshot=True, resident=ids[i::NUM_PREFILL]))
        name = f"prefill-{i}"
        workers[name] = WorkerView(name, "prefill", incarnation="1", warm_pairs=warm, residency=residency, **UP)
    fleet, placer = FleetState(workers, loads, holders), Placer(loads, random=random)
    for _ in range(num_placements):
        blocks = tuple(random.getrandbits(60) for _ in range(4))
        asked = PlacementRequest(random.choice(ids), size=PromptSize(500, 756, blocks, 128.0))
        request = placer.observe(asked)
        fleet = FleetState(workers, loads, Holders()) if is_changing else fleet
        placement = placer.place(request, fleet, FailedAttempts())
        placer.take(request, placement)
