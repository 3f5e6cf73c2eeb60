"""Why no placement can take a request: never in this cluster, its revision is lost, or not at this moment."""

from adapters.catalog.records import AdapterRevision
from router.errors import AdapterRevisionGone, NeedsUnifiedWorker, NoWorkerAvailable, RouterError
from router.fleet.fleet_state import FleetState
from router.placement.request import PlacementRequest


def unplaceable_error(revision: AdapterRevision | None, fleet: FleetState) -> RouterError:
    """The error for a request for which `place` finds no placement."""
    request = PlacementRequest.of(revision)
    if revision is not None and lacks_unified_worker(request, fleet):
        return NeedsUnifiedWorker(
            f"the adapter {revision.full_name!r} acts on {request.positions!r} positions, which only a unified "
            "worker can serve; this cluster has none",
            param="adapter",
        )
    if revision is not None and is_gone(request, fleet):
        name = revision.full_name
        return AdapterRevisionGone(
            f"{name}@r{revision.number} ({revision.revision_id}) was kept in workers' memory only, and no worker "
            "has it any more; push it again, or move the alias back that led to it: "
            f"`prelude adapters rollback {name}@ALIAS`",
            param="adapter",
        )
    what = "unified worker" if request.positions == "all" else "worker"
    return NoWorkerAvailable(f"no {what} can take the request now; try again soon")


def is_gone(request: PlacementRequest, fleet: FleetState) -> bool:
    """True if a memory-only revision is lost: all workers that could hold it are connected, and none has it."""
    if request.is_stored:
        return False
    roles = ("unified",) if request.positions == "all" else ("prefill", "unified")
    holders = [worker for worker in fleet.workers.values() if worker.role in roles]
    return fleet.is_settled and all(worker.is_connected and not request.can_be_read_by(worker) for worker in holders)


def lacks_unified_worker(request: PlacementRequest, fleet: FleetState) -> bool:
    """True if this cluster can never serve the request: no worker has the role that it needs, or may join with it."""
    is_absent = all(worker.role != "unified" for worker in fleet.workers.values())
    return request.positions == "all" and is_absent and "unified" not in fleet.open_roles
