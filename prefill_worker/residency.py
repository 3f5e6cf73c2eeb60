"""Which revisions the engine holds, and how one becomes resident: read, verify, write for the engine, load."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.errors import AdapterError, AdapterNotFound, AdapterUnsupported
from adapters.formats import Limits
from adapters.identity import folder_of
from adapters.packed import write_for_engine
from adapters.revision import Revision, read_revision
from adapters.serving import EngineDtype
from cluster.worker_metrics import WorkerMetrics
from cluster.worker_state import WorkerStateHub
from engine.client import EngineClient
from engine.errors import EngineError

_LOAD_TIMEOUT_S = 120.0


class Residency:
    """Owner of the engine's adapters. One load per revision, however many requests wait for it."""

    def __init__(
        self,
        revisions: dict[str, Revision],
        base: BaseModel,
        limits: Limits,
        dtype: EngineDtype,
        served_positions: frozenset[str],
        cache: Path,
        hub: WorkerStateHub,
        metrics: WorkerMetrics,
    ) -> None:
        self._revisions = revisions
        self._base = base
        self._limits = limits
        self._dtype = dtype
        self._served_positions = served_positions
        self._cache = cache
        self._hub = hub
        self._metrics = metrics
        self._loads: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, revision_id: str, engine: EngineClient) -> float:
        """Return once the engine can use the revision; the seconds waited, 0 when it was resident.

        Raises AdapterError when the revision cannot be served, EngineError when the engine cannot take it.
        """
        if revision_id in self._hub.resident:
            return 0.0
        started_at = time.monotonic()
        if revision_id not in self._loads:
            load = asyncio.create_task(self._load(revision_id, engine), name=f"load {revision_id}")
            self._loads[revision_id] = load
            load.add_done_callback(lambda done: self._forget(revision_id, done))
        # A waiter that leaves must not end the load for the others.
        await asyncio.shield(self._loads[revision_id])
        return time.monotonic() - started_at

    def engine_gone(self) -> None:
        """Give up what was being loaded into an engine that ended."""
        for load in self._loads.values():
            load.cancel()

    async def _load(self, revision_id: str, engine: EngineClient) -> None:
        started_at = time.monotonic()
        try:
            directory = await asyncio.to_thread(self._prepare, revision_id)
            await engine.load_adapter(revision_id, directory, _LOAD_TIMEOUT_S)
        except AdapterError as error:
            self._metrics.count_load_failure(error.code)
            raise
        except EngineError:
            self._metrics.count_load_failure("engine")
            raise
        except asyncio.CancelledError:
            raise EngineError("the engine ended while the adapter was being loaded") from None
        self._metrics.adapter_load_seconds.observe(time.monotonic() - started_at)
        self._hub.add_resident(revision_id)

    def _prepare(self, revision_id: str) -> Path:
        """The revision's directory in the form that the engine loads, made now if it is not cached. Blocking."""
        revision = self._revisions.get(revision_id)
        if revision is None:
            raise AdapterNotFound(f"revision {revision_id} is not in this worker's catalog")
        if revision.manifest.positions not in self._served_positions:
            raise AdapterUnsupported(
                f"adapter {revision.full_name} acts on {revision.manifest.positions!r} positions, which only a unified "
                "worker can serve"
            )
        directory = self._cache / folder_of(revision_id)
        if directory.exists():
            return directory
        adapter = read_revision(revision.directory, revision_id, self._base, self._limits)
        self._cache.mkdir(parents=True, exist_ok=True)
        write_for_engine(adapter, self._base, self._dtype, directory)
        return directory

    def _forget(self, revision_id: str, done: asyncio.Task[None]) -> None:
        self._loads.pop(revision_id, None)
        if not done.cancelled():
            done.exception()  # each waiter has raised it; without waiters it is in the metrics
