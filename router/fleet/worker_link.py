"""The link to one worker's agent: its control stream, as WorkerViews, and calls about adapters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

import grpc

from adapters.library import PackedAdapter
from cluster.control import control_pb2 as control
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.heartbeat import MISSED_HEARTBEATS, next_state
from cluster.control.transport import PLAIN, AgentChannel, Transport
from cluster.errors import ANSWER_MARGIN_S
from process.tracing.span import NO_SPAN, Span
from router.errors import WorkerLost
from router.fleet.fleet_state import WorkerView
from router.fleet.worker_errors import ensure_adapter_error
from router.fleet.worker_residency import WorkerResidency

Tier = Literal["host", "disk"]  # "disk": fetched but not loaded

_RETRY_S = (0.1, 0.2, 0.4, 0.8)  # back-off between connections; the last one repeats
_CHUNK_BYTES = 1024**2  # of PutAdapter
_CHANNEL_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 800))
_TIERS: dict[Tier, control.Tier] = {"host": control.TIER_HOST, "disk": control.TIER_DISK}
_ROLES = {control.ROLE_PREFILL: "prefill", control.ROLE_DECODE: "decode", control.ROLE_UNIFIED: "unified"}

log = logging.getLogger(__name__)


class LoadReport(Protocol):
    """Takes what an engine reports of its KV memory and its progress."""

    def __call__(self, worker: str, *, used_kv_tokens: int, max_kv_tokens: int, progress: int) -> None: ...


class WorkerLink:
    """Follows one worker and calls its agent. `run` hands every new view to `on_view`."""

    def __init__(
        self,
        view: WorkerView,
        address: str,
        *,
        heartbeat_s: float,
        connect_timeout_s: float,
        on_view: Callable[[WorkerView], None],
        on_load: LoadReport,
        transport: Transport = PLAIN,
    ) -> None:
        self._view = view
        self._channel = AgentChannel(transport, address, view.role, view.name, _CHANNEL_OPTIONS)
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._connect_timeout_s = connect_timeout_s
        self._on_view = on_view
        self._on_load = on_load
        self._stub: WorkerControlStub | None = None
        self._logged = ""
        self._late_until = 0.0  # by the loop's clock

    async def run(self) -> None:
        """Connect, follow the control stream, publish the loss of contact, reconnect. Ends only by cancellation."""
        num_failures = 0
        try:
            while True:
                try:
                    self._stub = await self._channel.stub()
                    await self._describe()
                    num_failures = 0
                    await self._follow()
                    await asyncio.sleep(_RETRY_S[0])  # the agent closed the stream normally
                    continue
                except TimeoutError:
                    reason = f"silent for {MISSED_HEARTBEATS} heartbeats"
                except grpc.aio.AioRpcError as error:
                    reason = f"its agent cannot be reached at {self._address}: {error.code().name.lower()}"
                    self._log_once(error.details() or "")
                except Exception:  # the edge of this worker's task; other workers must go on
                    log.exception("worker link failed", extra={"fields": {"worker": self._view.name}})
                    reason = "the router's link to it failed; see the router's log"
                self._publish(self._view_without_contact(reason))
                await asyncio.sleep(_RETRY_S[min(num_failures, len(_RETRY_S) - 1)])
                num_failures += 1
        finally:
            await self._channel.aclose()

    async def ensure_adapter(
        self,
        revision_id: str,
        timeout_s: float,
        *,
        prewarm: bool = False,
        not_in_engine: bool = False,
        tier: Tier = "host",
        span: Span = NO_SPAN,
    ) -> float:
        """Make a revision resident, or fetch it to the tier. Returns the seconds that loading took.

        A prewarm has a lower priority than loads that requests wait for. `not_in_engine`: the engine has just reported
        that it does not have the revision. Raises RouterError.
        """
        request = control.EnsureAdapterRequest(
            revision_id=revision_id,
            deadline_s=timeout_s,
            tier=_TIERS[tier],
            prewarm=prewarm,
            not_in_engine=not_in_engine,
        )
        return (await self._call("EnsureAdapter", request, revision_id, timeout_s, span)).load_s

    async def put_adapter(self, packed: PackedAdapter, timeout_s: float) -> bool:
        """Send a memory-only revision and pin it. True if it was pinned before. Raises RouterError."""
        messages = _put_messages(packed, timeout_s)
        return (await self._call("PutAdapter", messages, packed.revision_id, timeout_s)).was_pinned

    async def pin_adapter(self, revision_id: str, pinned: bool, timeout_s: float, *, memory_only: bool = False) -> None:
        """Make a revision resident and pin it, or unpin it. Raises RouterError.

        `memory_only`: set or release the pin of `put_adapter` instead of the operator's.
        """
        request = control.PinAdapterRequest(
            revision_id=revision_id, pinned=pinned, deadline_s=timeout_s, memory_only=memory_only
        )
        await self._call("PinAdapter", request, revision_id, timeout_s)

    async def evict_adapter(self, revision_id: str, from_disk: bool, timeout_s: float) -> bool:
        """Remove a revision from host memory and, with `from_disk`, from the disk. False if it was in neither.

        Raises RouterError, also while the revision is in use or pinned.
        """
        request = control.EvictAdapterRequest(revision_id=revision_id, from_disk=from_disk)
        return (await self._call("EvictAdapter", request, revision_id, timeout_s)).evicted

    async def _call(self, method: str, request: Any, revision_id: str, timeout_s: float, span: Span = NO_SPAN) -> Any:
        """The response to a call. Waits past the deadline for the agent's error at the deadline. Raises RouterError."""
        if self._stub is None:
            raise WorkerLost(f"worker {self._view.name} has no control stream", worker=self._view.name)
        try:
            call = getattr(self._stub, method)
            return await call(request, timeout=timeout_s + ANSWER_MARGIN_S, metadata=tuple(span.headers.items()))
        except grpc.aio.AioRpcError as error:
            details, code = error.details() or "", error.code()
            fields = {"call": method, "worker": self._view.name, "revision": revision_id}
            log.info("call refused", extra={"fields": {**fields, "reason": details, "code": code.name}})
            metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
            raise ensure_adapter_error(code, details, metadata, self._view.name) from error

    async def _describe(self) -> None:
        assert self._stub is not None
        description = await self._stub.Describe(control.DescribeRequest(), timeout=self._connect_timeout_s)
        role = _ROLES.get(description.role, "unknown")
        if role != self._view.role:
            log.error(
                "worker role differs from cluster.yaml; using the worker's",
                extra={"fields": {"worker": self._view.name, "role": role, "configured_role": self._view.role}},
            )
        self._view = replace(
            self._view,
            role=role,
            engine_url=description.engine_url.rstrip("/"),
            kv_host=description.kv_host,
            kv_bootstrap_port=description.kv_bootstrap_port,
            domain=description.domain,
        )

    async def _follow(self) -> None:
        """Publish every state until the stream ends. Raises TimeoutError after three missed heartbeats."""
        assert self._stub is not None
        # A new object: users of earlier views still read the old one.
        self._view = replace(self._view, residency=WorkerResidency())
        stream = self._stub.WatchState(control.WatchStateRequest(heartbeat_s=self._heartbeat_s))
        try:
            while True:
                state = await next_state(stream, self._heartbeat_s)
                if state is grpc.aio.EOF:
                    return
                self._view.residency.apply(state.residency)
                load = state.load
                self._on_load(
                    self._view.name,
                    used_kv_tokens=load.used_kv_tokens,
                    max_kv_tokens=load.max_kv_tokens,
                    progress=state.progress,
                )
                num_changes = self._view.num_residency_changes + bool(state.residency.ByteSize())
                self._publish(replace(_view_after(self._view, state), num_residency_changes=num_changes))
        finally:
            stream.cancel()

    def _log_once(self, details: str) -> None:
        """Log why the agent cannot be reached (a certificate, say), again only when that changes."""
        if details != self._logged:
            self._logged = details
            log.info("agent not reached", extra={"fields": {"worker": self._view.name, "details": details[:500]}})

    def _view_without_contact(self, reason: str) -> WorkerView:
        now = asyncio.get_running_loop().time()
        if self._view.is_connected:
            grace_s = MISSED_HEARTBEATS * self._heartbeat_s if self._view.is_placeable else 0.0
            self._late_until = now + grace_s
        is_late = now < self._late_until
        return replace(self._view, is_connected=False, is_ready=False, is_late=is_late, reason=reason)

    def _publish(self, view: WorkerView) -> None:
        before, self._view = self._view, view
        if (before.is_placeable, before.incarnation) != (view.is_placeable, view.incarnation):
            fields = {"worker": view.name, "incarnation": view.incarnation, "reason": view.why_not_placeable}
            log.info("worker placeable" if view.is_placeable else "worker not placeable", extra={"fields": fields})
        self._on_view(view)


async def _put_messages(packed: PackedAdapter, timeout_s: float) -> AsyncIterator[control.PutAdapterRequest]:
    envelope = packed.envelope
    yield control.PutAdapterRequest(
        begin=control.PutAdapterBegin(
            revision_id=envelope.revision_id,
            content_bytes=envelope.content_bytes,
            content_sha256=envelope.content_sha256,
            deadline_s=timeout_s,
        )
    )
    with packed.path.open("rb", buffering=0) as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield control.PutAdapterRequest(chunk=chunk)


def _view_after(view: WorkerView, state: control.WorkerState) -> WorkerView:
    return replace(
        view,
        is_connected=True,
        is_late=False,
        reason=state.reason,
        incarnation=state.incarnation,
        is_engine_up=state.engine_state == control.ENGINE_STATE_UP,
        is_ready=state.ready,
        is_hung=state.hung,
        is_draining=state.draining,
        warm_pairs=frozenset((pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs),
    )
