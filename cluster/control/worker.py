"""What an agent's servers need to know of the worker that they answer for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from prometheus_client import CollectorRegistry

from adapters.store import Envelope
from cluster.config.schema import WorkerConfig
from cluster.control import control_pb2 as pb
from cluster.control.worker_state import WorkerStateHub


class AdapterOperations(Protocol):
    """What the control service asks of workers that hold adapters."""

    async def ensure_adapter(
        self, revision_id: str, tier: pb.Tier, deadline_s: float, *, is_prewarm: bool, not_in_engine: bool
    ) -> pb.EnsureAdapterResponse:
        """Bring a revision to a tier, again if the engine was found not to have it.

        Raises AdapterError, EngineError or TimeoutError.
        """

    async def pin_adapter(self, revision_id: str, pinned: bool, memory_only: bool, deadline_s: float) -> None:
        """Make a revision resident and keep it so, or stop keeping it. Raises as `ensure_adapter`.

        `memory_only`: it is the pin of `put_adapter` that is meant.
        """

    async def put_adapter(
        self, envelope: Envelope, content: AsyncIterator[bytes], deadline_s: float
    ) -> pb.PutAdapterResponse:
        """Take in a revision that no store has, and keep it resident. Raises as `ensure_adapter`."""

    async def evict_adapter(self, revision_id: str, from_disk: bool) -> bool:
        """Take a revision out; False where there is none. Raises AdapterError or EngineError."""


class Worker(Protocol):
    """One worker, as the control service and its plain HTTP see it."""

    name: str
    worker: WorkerConfig
    hub: WorkerStateHub
    adapters: AdapterOperations | None  # None where the engine has no slots for adapters

    @property
    def registry(self) -> CollectorRegistry:
        """Its metrics."""

    def describe(self) -> pb.WorkerDescription:
        """What does not change while this agent lives."""

    async def drain(self, deadline_s: float) -> bool:
        """Take no more requests; true when those in flight finished within the deadline."""
