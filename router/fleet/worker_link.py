"""The link to one worker's agent: its control stream, as WorkerViews, and calls about adapters."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from adapters.library import PackedAdapter
from cluster.config.fields import host_of
from cluster.control import control_pb2 as control
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.transport import MISSED_HEARTBEATS, PLAIN, ROLES, AgentChannel, Transport, next_state
from cluster.discovery.descriptions import metrics_address
from cluster.discovery.roster import Contact
from cluster.errors import ANSWER_MARGIN_S, DescriptionRefused
from process.addresses import is_of_this_host
from process.exhaustion import is_exhaustion_text
from process.tracing.span import NO_SPAN, Span
from router.errors import AdapterRefused, WorkerLost
from router.fleet.fleet_state import Holders, WorkerResidency, WorkerView
from router.fleet.worker_errors import ensure_adapter_error

_RETRY_S = (0.1, 0.2, 0.4, 0.8)  # back-off between connections; the last one repeats
_CHUNK_BYTES = 1024**2  # of PutAdapter
_NOT_RECEIVED = "adapter_not_received"  # the agent's code for content that is missing
_REFUSED_RETRY_S = 5.0  # until a worker that must not be used is asked again
_MAX_PAIRS = 4096  # of one worker
_GIVE_BACK_AFTER_S = 1.0  # of a change of role: prompts that wait for a full decode worker would hold it up
_MAX_TEXT = 1000  # characters of a reason or an incarnation
_MAX_REVISIONS = 1_000_000  # that one worker reports

# What becomes of a change of role, by the status of its call.
_FAILED_CHANGES = {grpc.StatusCode.DEADLINE_EXCEEDED: "timed_out", grpc.StatusCode.UNAVAILABLE: "lost"}

log = logging.getLogger(__name__)


class WorkerLink:
    """Follows one worker and calls its agent. `run` reports every new view, with the message that caused it, if any."""

    def __init__(
        self,
        contact: Contact,
        *,
        heartbeat_s: float,
        connect_timeout_s: float,
        report: Callable[[WorkerView, control.WorkerState | None], None],
        holders: Holders,
        transport: Transport = PLAIN,
    ) -> None:
        self.contact = contact
        self.view = WorkerView(contact.name, contact.endpoint.role, contact.number)
        self._address = contact.endpoint.address
        self._channel = AgentChannel(transport, self._address, contact.endpoint.role, contact.name)
        self._logged = ""
        self._heartbeat_s = heartbeat_s
        self._connect_timeout_s = connect_timeout_s
        self._report = report
        self._holders = holders
        self._stub: WorkerControlStub | None = None
        self._late_until = 0.0  # by the loop's clock
        self._num_uses = 0
        self._is_unused = asyncio.Event()
        self._is_unused.set()

    async def run(self) -> None:
        """Connect, follow the control stream, publish losses of contact, reconnect. Runs until cancelled."""
        num_failures = 0
        try:
            while True:
                pause_s = _RETRY_S[min(num_failures, len(_RETRY_S) - 1)]
                try:
                    self._stub = await self._channel.stub()
                    await self._describe()
                    num_failures = 0
                    await self._follow()
                    await asyncio.sleep(_RETRY_S[0])  # the agent closed the stream normally
                    continue
                except TimeoutError as error:
                    reason = str(error) or f"silent for {MISSED_HEARTBEATS} heartbeats"
                except DescriptionRefused as error:
                    reason, pause_s = str(error), _REFUSED_RETRY_S
                except grpc.aio.AioRpcError as error:
                    details = error.details() or ""
                    is_ours = is_exhaustion_text(details)
                    why = "this router is out of descriptors" if is_ours else error.code().name.lower()
                    reason = f"its agent cannot be reached at {self._address}: {why}"
                    self._log_once(details)
                except Exception:  # the edge of this worker's task; other workers must go on
                    log.exception("worker link failed", extra={"fields": {"worker": self.view.name}})
                    reason = "the router's link to it failed; see the router's log"
                self._publish(self._view_without_contact(reason))
                self.contact.lost()
                await asyncio.sleep(pause_s)
                num_failures += 1
        finally:
            await self._channel.aclose()

    def begin_use(self) -> None:
        """Keep the link, even if its worker leaves, until `end_use`."""
        self._num_uses += 1
        self._is_unused.clear()

    def end_use(self) -> None:
        self._num_uses -= 1
        if not self._num_uses:
            self._is_unused.set()

    async def until_unused(self) -> None:
        """Wait until nobody uses it."""
        await self._is_unused.wait()

    async def ensure_adapter(
        self,
        revision_id: str,
        timeout_s: float,
        *,
        prewarm: bool = False,
        not_in_engine: bool = False,
        tenant: str,
        span: Span = NO_SPAN,
    ) -> float:
        """Make a revision resident. Returns the seconds that loading took.

        A prewarm has lower priority than loads that requests wait for. `not_in_engine`: the engine has just reported
        that it lacks the revision. `tenant`: who waits for it; a worker's waiting loads start in turns of tenants.
        Raises RouterError.
        """
        request = control.EnsureAdapterRequest(
            revision_id=revision_id,
            deadline_s=timeout_s,
            prewarm=prewarm,
            not_in_engine=not_in_engine,
            tenant=tenant,
        )
        return (await self._call("EnsureAdapter", request, revision_id, timeout_s, span)).load_s

    async def put_adapter(self, packed: PackedAdapter, timeout_s: float) -> bool:
        """Send a memory-only revision and pin it. True if it was pinned before. Raises RouterError.

        A worker on this host takes the file itself, or says that it cannot.
        """
        if await is_of_this_host(host_of(self._address)):
            try:
                return await self._put(packed, timeout_s, with_content=False)
            except AdapterRefused as refused:
                if refused.code != _NOT_RECEIVED:
                    raise
        return await self._put(packed, timeout_s, with_content=True)

    async def _put(self, packed: PackedAdapter, timeout_s: float, *, with_content: bool) -> bool:
        messages = _put_messages(packed, timeout_s, with_content=with_content)
        answer = await self._call("PutAdapter", messages, packed.revision_id, timeout_s)
        self.view.residency.kept.add(packed.revision_id)
        return bool(answer.was_pinned)

    async def pin_adapter(self, revision_id: str, pinned: bool, timeout_s: float) -> None:
        """Renew or release the pin of `put_adapter`. Raises RouterError."""
        request = control.PinAdapterRequest(revision_id=revision_id, pinned=pinned, deadline_s=timeout_s)
        await self._call("PinAdapter", request, revision_id, timeout_s)
        kept = self.view.residency.kept  # the worker reports it, too, but later
        (kept.add if pinned else kept.discard)(revision_id)

    async def evict_adapter(self, revision_id: str, from_disk: bool, timeout_s: float) -> bool:
        """Remove a revision from host memory and, with `from_disk`, from disk. False if it was in neither.

        Raises RouterError, also while the revision is in use or pinned.
        """
        request = control.EvictAdapterRequest(revision_id=revision_id, from_disk=from_disk)
        return (await self._call("EvictAdapter", request, revision_id, timeout_s)).evicted

    async def change_role(self, role: str, drain_timeout_s: float) -> str:
        """Have the worker change its role. Returns what came of it: done, refused, timed_out or lost."""
        request = control.ChangeRoleRequest(
            role=f"ROLE_{role.upper()}", deadline_s=drain_timeout_s, give_back_after_s=_GIVE_BACK_AFTER_S
        )
        try:
            await self._answer("ChangeRole", request, drain_timeout_s)
        except grpc.aio.AioRpcError as error:
            return _FAILED_CHANGES.get(error.code(), "refused")
        except WorkerLost:
            return "lost"
        return "done"

    async def _call(self, method: str, request: Any, revision_id: str, timeout_s: float, span: Span = NO_SPAN) -> Any:
        """The answer to a call about an adapter. Raises RouterError."""
        try:
            return await self._answer(method, request, timeout_s, span)
        except grpc.aio.AioRpcError as error:
            details, code = error.details() or "", error.code()
            fields = {"call": method, "worker": self.view.name, "revision": revision_id}
            log.info("call refused", extra={"fields": {**fields, "reason": details, "code": code.name}})
            metadata = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
            raise ensure_adapter_error(code, details, metadata, self.view.name) from error

    async def _answer(self, method: str, request: Any, timeout_s: float, span: Span = NO_SPAN) -> Any:
        """Call the agent. Waits past the deadline for the error that it reports then. Raises WorkerLost, AioRpcError.

        It keeps the link meanwhile: closing the channel would cancel who waits here.
        """
        if self._stub is None:
            raise WorkerLost(f"worker {self.view.name} has no control stream", worker=self.view.name)
        self.begin_use()
        try:
            call = getattr(self._stub, method)
            return await call(request, timeout=timeout_s + ANSWER_MARGIN_S, metadata=tuple(span.headers.items()))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            # The channel was closed for a new one with newer certificates: nobody knows what became of the call.
            raise WorkerLost(f"the connection to worker {self.view.name} was closed", worker=self.view.name) from None
        finally:
            self.end_use()

    async def _describe(self) -> None:
        assert self._stub is not None
        described = await self._stub.Describe(control.DescribeRequest(), timeout=self._connect_timeout_s)
        self._channel.check_name(described.name)
        self.view = replace(
            self.view,
            name=self.contact.endpoint.name or described.name,
            role=ROLES.get(described.role, "unknown"),
            engine_url=described.engine_url.rstrip("/"),
            engine_key=described.engine_key,
            kv_host=described.kv_host,
            kv_bootstrap_port=described.kv_bootstrap_port,
            domain=described.domain,
            metrics_address=metrics_address(self._address, described),
        )
        self.contact.describe(described)

    async def _follow(self) -> None:
        """Publish every state until the stream ends. Raises TimeoutError after three missed heartbeats."""
        assert self._stub is not None
        # A new object: users of earlier views still read the old one.
        self.view.residency.leave()
        self.view = replace(self.view, residency=WorkerResidency(self._holders))
        asked = control.WatchStateRequest(heartbeat_s=self._heartbeat_s, places_requests=True)
        stream = self._stub.WatchState(asked)
        try:
            while True:
                state = await next_state(stream, self._heartbeat_s)
                if state is grpc.aio.EOF:
                    return
                residency = self.view.residency
                residency.apply(state.residency)
                sets = residency.host, residency.disk, residency.memory_only, residency.kept
                if sum(map(len, sets)) > _MAX_REVISIONS:
                    raise DescriptionRefused(f"it reports more than {_MAX_REVISIONS} adapters")
                num_changes = self.view.num_residency_changes + bool(state.residency.ByteSize())
                self._publish(replace(_view_after(self.view, state), num_residency_changes=num_changes), state)
        finally:
            stream.cancel()

    def _log_once(self, details: str) -> None:
        """Log why the agent cannot be reached (for example its certificate), again only when the reason changes."""
        if details != self._logged:
            self._logged = details
            fields = {"worker": self.view.name, "address": self._address, "details": details[:500]}
            log.info("agent not reached", extra={"fields": fields})

    def _view_without_contact(self, reason: str) -> WorkerView:
        now = asyncio.get_running_loop().time()
        if self.view.is_connected:
            grace_s = MISSED_HEARTBEATS * self._heartbeat_s if self.view.is_placeable else 0.0
            self._late_until = now + grace_s
        is_late = now < self._late_until
        return replace(self.view, is_connected=False, is_ready=False, is_late=is_late, reason=reason)

    def _publish(self, view: WorkerView, state: control.WorkerState | None = None) -> None:
        before, self.view = self.view, view
        if (before.is_placeable, before.incarnation) != (view.is_placeable, view.incarnation):
            fields = {"worker": view.name, "incarnation": view.incarnation, "reason": view.why_not_placeable}
            log.info("worker placeable" if view.is_placeable else "worker not placeable", extra={"fields": fields})
        self._report(view, state)


async def _put_messages(
    packed: PackedAdapter, timeout_s: float, *, with_content: bool
) -> AsyncIterator[control.PutAdapterRequest]:
    envelope = packed.envelope
    yield control.PutAdapterRequest(
        begin=control.PutAdapterBegin(
            revision_id=envelope.revision_id,
            content_bytes=envelope.content_bytes,
            content_sha256=envelope.content_sha256,
            path=str(packed.path),
            signature=envelope.signature,
            deadline_s=timeout_s,
        )
    )
    if not with_content:
        return
    with packed.path.open("rb", buffering=0) as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield control.PutAdapterRequest(chunk=chunk)


def _view_after(view: WorkerView, state: control.WorkerState) -> WorkerView:
    return replace(
        view,
        is_connected=True,
        is_late=False,
        reason=state.reason[:_MAX_TEXT],
        incarnation=state.incarnation[:_MAX_TEXT],
        is_engine_up=state.engine_state == control.ENGINE_STATE_UP,
        is_ready=state.ready,
        is_hung=state.hung,
        is_draining=state.draining,
        gives_back=state.gives_back,
        warm_pairs=frozenset((pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs[:_MAX_PAIRS]),
    )
