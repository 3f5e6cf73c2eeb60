"""The interface between an agent's servers and its worker."""

from collections.abc import AsyncIterator
from typing import Protocol

from prometheus_client import CollectorRegistry

from adapters.store import Envelope
from cluster.config.workers import WorkerConfig
from cluster.control import control_pb2 as pb
from cluster.control.transport import Transport
from cluster.control.worker_state import WorkerStateHub
from process.tracing.span import Span, Tracing


class AdapterOperations(Protocol):
    """Operations of workers that hold adapters."""

    async def ensure_adapter(
        self, request: pb.EnsureAdapterRequest, deadline_s: float, span: Span
    ) -> pb.EnsureAdapterResponse:
        """Make a revision resident, in the turn of its tenant. The load is a step of `span`.

        Raises AdapterError, EngineError or TimeoutError.
        """

    async def pin_adapter(self, revision_id: str, pinned: bool, deadline_s: float) -> None:
        """Renew or release the pin made by `put_adapter`. Raises as `ensure_adapter`."""

    async def put_adapter(
        self, envelope: Envelope, path: str, content: AsyncIterator[bytes], deadline_s: float
    ) -> pb.PutAdapterResponse:
        """Receive, load and pin a revision that no store has. Raises as `ensure_adapter`.

        The file at `path` is taken instead of the content if this host has it.
        """

    async def evict_adapter(self, revision_id: str, from_disk: bool) -> bool:
        """Evict a revision; False if it was not present. Raises AdapterError or EngineError."""


class Worker(Protocol):
    """A worker, as the control service and the HTTP endpoints use it."""

    name: str
    worker: WorkerConfig
    hub: WorkerStateHub
    transport: Transport
    adapters: AdapterOperations | None  # None where the engine has no slots for adapters
    tracing: Tracing

    @property
    def registry(self) -> CollectorRegistry:
        """The worker's metrics."""

    async def engine_metrics(self) -> bytes:
        """The engine's own metrics, in Prometheus' text format. Raises EngineError."""

    def describe(self) -> pb.WorkerDescription:
        """The worker's properties, constant for the agent's lifetime."""

    async def drain(self, deadline_s: float | None) -> bool:
        """Stop taking requests; true if those in flight finished within the deadline, by default `drain_timeout_s`."""

    def undrain(self) -> bool:
        """Take requests again; true if it was draining. Raises WorkerStopping."""

    async def change_role(
        self, role: str, deadline_s: float | None, give_back_after_s: float = 0.0, *, even_last: bool = False
    ) -> None:
        """Drain, then end for an agent of another role. Raises RoleChangeRefused, or TimeoutError if requests go on."""
