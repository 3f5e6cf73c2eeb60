"""A snapshot of all workers. Immutable except for residency and load, which are live."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b

import numpy as np

from cluster.control import control_pb2 as control
from router.fleet.worker_loads import WorkerLoad, WorkerLoads

MAX_HOMES = 16  # of a revision
_MAX_MEMORIZED = 16_384
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


class Holders:
    """Maps a revision id to the WorkerResidency objects that have it in host memory, which keep this index current."""

    def __init__(self) -> None:
        self._holders: dict[str, tuple[object, ...]] = {}  # few each, of very many revisions

    def of(self, revision_id: str) -> tuple[object, ...]:
        return self._holders.get(revision_id, ())

    def add(self, revision_id: str, holder: object) -> None:
        self._holders[revision_id] = (*self.of(revision_id), holder)

    def discard(self, revision_id: str, holder: object) -> None:
        left = tuple(each for each in self.of(revision_id) if each is not holder)
        if left:
            self._holders[revision_id] = left
        else:
            self._holders.pop(revision_id, None)


class Homes:
    """The order of some workers for every key."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._length = min(MAX_HOMES, len(workers))
        self._seeds = np.array([_hash(name) for name in workers], dtype=np.uint64)
        self.order = lru_cache(_MAX_MEMORIZED)(self._order)

    def _order(self, key: str) -> tuple[int, ...]:
        """Indices of the workers, the key's first home first: at most MAX_HOMES."""
        scores = self._seeds ^ np.uint64(_hash(key))
        scores ^= scores >> _SHIFT_1
        scores *= _MULTIPLIER_1
        scores ^= scores >> _SHIFT_2
        scores *= _MULTIPLIER_2
        scores ^= scores >> _SHIFT_3
        return tuple(scores.argsort()[: -self._length - 1 : -1].tolist())


@lru_cache(maxsize=8)  # each may know the orders of very many keys
def homes_of(workers: tuple[str, ...]) -> Homes:
    """The Homes of these workers, cached with the orders computed so far: most fleet changes do not affect them."""
    return Homes(workers)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class WorkerResidency:
    """Revision ids in a worker's host memory and on its disk, those that only its memory has, and those it must keep.

    There is one per control stream, and only its WorkerLink updates it. All WorkerViews of the stream share it, because
    copying 100,000 ids for each view would cost too much. It is the only mutable part of a view. Its sets are changed
    in place: keep references to them no longer than a FleetState.
    """

    def __init__(self, holders: Holders | None = None) -> None:
        """`holders`: of the whole fleet, kept current until `leave`."""
        self._holders = holders or Holders()
        self.host: set[str] = set()  # resident: usable without a load
        self.disk: set[str] = set()
        self.memory_only: set[str] = set()  # in this worker's memory and in no store; usable while its engine is up
        self.kept: set[str] = set()  # pinned, as it has reported or confirmed

    def can_use_unstored(self, revision_id: str) -> bool:
        """True if the worker has this revision, which it could not fetch from a store."""
        return revision_id in self.memory_only or revision_id in self.host

    def apply(self, delta: control.ResidencyDelta) -> None:
        """Apply one message. A snapshot may take several, of which only the first is marked as one."""
        if delta.snapshot:
            self._evict(tuple(self.host))
            self.disk.clear()
            self.memory_only.clear()
            self.kept.clear()
        for revision_id in delta.resident:
            if revision_id not in self.host:
                self.host.add(revision_id)
                self._holders.add(revision_id, self)
        self._evict(delta.evicted)
        self.disk.update(delta.on_disk)
        self.disk.difference_update(delta.off_disk)
        self.memory_only.update(delta.in_memory_only)
        self.memory_only.difference_update(delta.not_in_memory_only)
        self.kept.update(delta.kept)
        self.kept.difference_update(delta.not_kept)

    def leave(self) -> None:
        """Leave the fleet's index, because another control stream has taken over. What was reported stays readable."""
        for revision_id in self.host:
            self._holders.discard(revision_id, self)
        self._holders = Holders()

    def _evict(self, revision_ids: Iterable[str]) -> None:
        for revision_id in revision_ids:
            if revision_id in self.host:
                self.host.remove(revision_id)
                self._holders.discard(revision_id, self)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The last known state of one worker, without its load."""

    name: str
    role: str  # "prefill", "decode" or "unified"; from cluster.yaml until the first Describe
    contact: int = 0  # number of the link to its agent; a worker that comes back at another address has another one
    is_connected: bool = False  # the last message of its agent is younger than three heartbeats
    is_late: bool = False  # not connected, but was placeable less than three heartbeats ago: expected back
    reason: str = "not reached yet"  # why it gets no requests, in words; may be empty
    # from Describe, once per connection
    engine_url: str = ""
    engine_key: str = field(default="", repr=False)  # the bearer token for requests
    kv_host: str = ""
    kv_bootstrap_port: int = 0
    domain: str = ""  # NVLink or RDMA domain; empty: unknown
    metrics_address: str = ""  # host:port of its agent's HTTP; empty: not said
    # from WatchState
    incarnation: str = ""  # of the engine; empty without one
    is_engine_up: bool = False
    is_ready: bool = False
    is_hung: bool = False  # the engine shows no sign of life; its agent restarts it if that goes on
    is_draining: bool = False
    gives_back: bool = False  # what it has not read or begun to answer should go elsewhere
    is_blocked: bool = False  # by this router's breaker
    # (decode name, its incarnation): a warm-up request has passed through these two engines; prefill only
    warm_pairs: frozenset[tuple[str, str]] = frozenset()
    residency: WorkerResidency = field(default_factory=WorkerResidency, compare=False)  # shared and mutable; see there
    num_residency_changes: int = field(default=0, compare=False)  # since the router started

    @property
    def is_placeable(self) -> bool:
        is_ready = self.is_connected and self.is_engine_up and self.is_ready
        return is_ready and not self.is_draining and not self.is_blocked

    @property
    def condition(self) -> str:
        """The worker's state, one of `router.metrics.WORKER_STATES`."""
        if not self.is_connected:
            return "lost"
        if self.is_hung:
            return "hung"
        if self.is_draining:
            return "draining"
        if not (self.is_engine_up and self.is_ready):
            return "not_ready"
        return "blocked" if self.is_blocked else "placeable"

    @property
    def why_not_placeable(self) -> str:
        """The reason in words. Empty if it is placeable."""
        if self.is_placeable:
            return ""
        if self.is_connected and self.is_draining:
            return self.reason or "draining"
        if self.is_connected and self.is_ready and self.is_blocked:
            return "calls to it have failed, or made no progress; this router tries it again within seconds"
        return self.reason or "the worker says it is not ready"


class FleetState:
    """All workers and their loads. Properties derived from the workers are computed once."""

    def __init__(
        self,
        workers: Mapping[str, WorkerView],
        loads: WorkerLoads,
        holders: Holders,  # that the residencies keep current
        *,
        open_roles: Set[str] = frozenset(),  # workers of these may join
        is_settled: bool = True,  # False: a worker may be there that is not known yet
    ) -> None:
        self.workers = workers
        self.loads = loads
        self._holders = holders
        self._warm_decodes: dict[str, tuple[WorkerView, ...]] = {}  # by prefill worker
        self._near_decodes: dict[str, tuple[WorkerView, ...]] = {}  # those of them in its domain
        self._with_late: dict[frozenset[str], FleetState] = {}  # many requests that have lost a worker ask for the same
        self.open_roles = open_roles
        self.is_settled = is_settled

    @cached_property
    def readers(self) -> tuple[WorkerView, ...]:
        """The placeable workers that read prompts, by name: prefill and unified."""
        return self._placeable("prefill", "unified")

    @cached_property
    def reader_loads(self) -> tuple[WorkerLoad, ...]:
        """The loads of `readers`, in their order."""
        return tuple(self.loads[worker.name] for worker in self.readers)

    @cached_property
    def unified_loads(self) -> tuple[WorkerLoad, ...]:
        """The loads of the unified workers among `readers`."""
        return tuple(self.loads[worker.name] for worker in self.readers if worker.role == "unified")

    def readers_with(self, revision_id: str) -> set[int]:
        """Indices of the readers that have a revision in host memory."""
        indices = self._reader_indices
        return {indices[each] for each in self._holders.of(revision_id) if each in indices}

    @cached_property
    def reader_disks(self) -> tuple[Set[str], ...]:
        """The revisions on the disks of `readers`, in their order, as current as the residencies."""
        return tuple(worker.residency.disk for worker in self.readers)

    @cached_property
    def _reader_indices(self) -> Mapping[object, int]:
        return {worker.residency: index for index, worker in enumerate(self.readers)}

    @cached_property
    def decodes(self) -> tuple[WorkerView, ...]:
        """The placeable decode workers, by name."""
        return self._placeable("decode")

    @cached_property
    def homes(self) -> Homes:
        """The rendezvous order of `readers`."""
        return homes_of(tuple(worker.name for worker in self.readers))

    @cached_property
    def cold_readers(self) -> Set[int]:
        """Indices of the prefill workers among `readers` that no placeable decode worker is warm with."""
        readers, keys = enumerate(self.readers), self._decode_keys
        return {i for i, worker in readers if worker.role == "prefill" and keys.isdisjoint(worker.warm_pairs)}

    @cached_property
    def _decode_keys(self) -> Set[tuple[str, str]]:
        """The keys under which `warm_pairs` lists the workers in `decodes`."""
        return frozenset((decode.name, decode.incarnation) for decode in self.decodes)

    def warm_decodes(self, prefill: WorkerView) -> tuple[WorkerView, ...]:
        """The placeable decode workers that are warm with a placeable prefill worker, by name."""
        found = self._warm_decodes.get(prefill.name)
        if found is None:
            pairs = prefill.warm_pairs
            # Nearly always with all: then no prefill worker looks at each decode worker.
            if pairs >= self._decode_keys:
                found = self.decodes
            else:
                found = tuple(decode for decode in self.decodes if (decode.name, decode.incarnation) in pairs)
            self._warm_decodes[prefill.name] = found
        return found

    def warm_decodes_in_domain(self, prefill: WorkerView) -> tuple[WorkerView, ...]:
        """The workers of `warm_decodes` in the prefill worker's NVLink or RDMA domain."""
        found = self._near_decodes.get(prefill.name)
        if found is None:
            found = tuple(decode for decode in self.warm_decodes(prefill) if decode.domain == prefill.domain)
            self._near_decodes[prefill.name] = found
        return found

    def with_late_workers(self, except_for: frozenset[str]) -> FleetState:
        """The state as if all late workers except `except_for` were back, unchanged since contact was lost."""
        found = self._with_late.get(except_for)
        if found is None:
            workers = {
                name: replace(view, is_connected=True, is_ready=True)
                if view.is_late and name not in except_for
                else view
                for name, view in self.workers.items()
            }
            found = self._with_late[except_for] = FleetState(
                workers, self.loads, self._holders, open_roles=self.open_roles, is_settled=self.is_settled
            )
        return found

    def _placeable(self, *roles: str) -> tuple[WorkerView, ...]:
        found: Iterable[WorkerView] = (v for v in self.workers.values() if v.role in roles and v.is_placeable)
        return tuple(sorted(found, key=lambda view: view.name))
