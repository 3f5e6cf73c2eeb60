"""A stand-in of a worker: its control service, beside a stand-in of its engine."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from support.router_stand_ins.adapters import MODEL
from support.router_stand_ins.engine import EngineStandIn

from adapters.errors import AdapterError
from cluster.control import control_pb2 as control
from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from cluster.control.transport import PLAIN, Transport

_ROLES = {"prefill": control.ROLE_PREFILL, "decode": control.ROLE_DECODE, "unified": control.ROLE_UNIFIED}


class WorkerStandIn(WorkerControlServicer):
    """An agent's control service with an engine behind it."""

    def __init__(self, name: str, role: str, transport: Transport = PLAIN) -> None:
        self.name = name
        self.transport = transport
        self.role = role
        self.domain = ""
        self.agent_id = f"{name}'s agent"
        self.described: dict[str, Any] = {}  # fields of its description that differ
        self.engine = EngineStandIn(role)
        self.state = control.WorkerState(incarnation=f"{name}-1", engine_state=control.ENGINE_STATE_UP, ready=True)
        self.resident: set[str] = set()
        self.memory_only: dict[str, bytes] = {}  # content received by PutAdapter
        self.kept: set[str] = set()  # pinned ones, which are not evicted
        self.unpinned: list[str] = []  # in the order of the calls
        self.pinned: list[str] = []  # likewise
        self.put_errors: list[grpc.StatusCode] = []  # one per call
        self.put_delay_s = 0.0
        self.keeps_deadlines = True
        self.sees_files = True  # of this host
        self.num_puts, self.num_chunks = 0, 0  # calls of PutAdapter, and of the last one
        self.reports_residency = True
        self.evicted: list[tuple[str, bool]] = []
        self._deltas: list[control.ResidencyDelta] = []
        self.ensured: list[str] = []
        self.metadata: list[dict[str, Any]] = []  # of each EnsureAdapter
        self.prewarmed: list[str] = []  # those of `ensured` that were prewarms
        self.not_in_engine: list[bool] = []  # the flag of each EnsureAdapter
        self.tenants: list[str] = []  # of each EnsureAdapter
        self.ensure_errors: list[AdapterError | grpc.StatusCode] = []  # one per call
        self.retry_after_s: float | None = None  # sent with every gRPC status of `ensure_errors`
        self.ensure_delay_s = 0.0
        self.asked_roles: list[str] = []  # by ChangeRole
        self.role_request = control.ChangeRoleRequest()  # the last one
        self.role_errors: list[grpc.StatusCode] = []  # one per such call
        self.may_end = asyncio.Event()  # until then, a change drains
        self.may_end.set()
        self._changing: asyncio.Task[None] | None = None
        self.has_no_store = False  # refuses what is neither resident nor memory-only
        self.sends_states = asyncio.Event()
        self.sends_states.set()
        self.address = ""
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        await self.engine.start()
        self.address = f"{host}:{await self._serve(f'{host}:{port}')}"

    async def _serve(self, address: str) -> int:
        self._server = grpc.aio.server()
        add_WorkerControlServicer_to_server(self, self._server)
        port = self.transport.add_port(self._server, address)
        await self._server.start()
        return port

    async def restart_agent(self) -> None:
        """Stop the agent, if it runs, and start it again at its address."""
        await self.stop_agent()
        self._deltas.clear()
        await self._serve(self.address)

    async def stop(self) -> None:
        await self.engine.stop()
        await self.stop_agent()

    async def stop_agent(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def change(self, **values: Any) -> None:
        """Change the state and send it."""
        async with self._changed:
            for name, value in values.items():
                setattr(self.state, name, value)
            self._changed.notify_all()

    async def crash_engine(self) -> None:
        """The engine dies; its agent notices."""
        await self.engine.stop()
        await self.change(engine_state=control.ENGINE_STATE_DOWN, ready=False, incarnation="", reason="engine died")

    async def Describe(self, request: Any, context: Any) -> control.WorkerDescription:
        fields = {"name": self.name, "role": _ROLES[self.role], "model": MODEL, "domain": self.domain}
        fields |= {"engine_url": self.engine.url, "engine_key": self.engine.key, "agent_id": self.agent_id}
        fields |= {"kv_host": "10.0.0.1", "kv_bootstrap_port": 8998} if self.role == "prefill" else {}
        return control.WorkerDescription(**fields | self.described)

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[control.WorkerState]:
        residency = control.ResidencyDelta(
            snapshot=True, resident=sorted(self.resident), in_memory_only=sorted(self.memory_only)
        )
        num_sent = len(self._deltas)
        while True:
            await self.sends_states.wait()
            self.state.residency.CopyFrom(residency)
            yield self.state
            residency = control.ResidencyDelta()
            if num_sent < len(self._deltas):  # one at a time, in order
                residency, num_sent = self._deltas[num_sent], num_sent + 1
                continue
            async with self._changed:
                try:
                    async with asyncio.timeout(request.heartbeat_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def EnsureAdapter(self, request: Any, context: Any) -> control.EnsureAdapterResponse:
        self.ensured.append(request.revision_id)
        self.metadata.append(dict(context.invocation_metadata()))
        self.prewarmed += [request.revision_id] if request.prewarm else []
        self.not_in_engine.append(request.not_in_engine)
        self.tenants.append(request.tenant)
        is_late = await self._sleep(self.ensure_delay_s, request.deadline_s)
        if self.ensure_errors:
            error = self.ensure_errors.pop(0)
            if isinstance(error, grpc.StatusCode):
                metadata = () if self.retry_after_s is None else (("prelude-retry-after-s", str(self.retry_after_s)),)
                await context.abort(error, "no", trailing_metadata=metadata)
            metadata = (("prelude-error-code", error.code), ("prelude-http-status", str(error.http_status)))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error), trailing_metadata=metadata)
        if is_late:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
        if request.revision_id not in self.resident | self.memory_only.keys() and self.has_no_store:
            gone = (("prelude-error-code", "adapter_revision_not_stored"), ("prelude-http-status", "404"))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not stored", trailing_metadata=gone)
        load_s = 0.0 if request.revision_id in self.resident else 0.25
        if load_s:
            await self.make_resident(request.revision_id)
        return control.EnsureAdapterResponse(load_s=load_s)

    async def PutAdapter(self, request_iterator: Any, context: Any) -> control.PutAdapterResponse:
        parts = [part async for part in request_iterator]
        self.num_puts += 1
        begin, content = parts[0].begin, b"".join(part.chunk for part in parts[1:])
        if not content:
            if not self.sees_files:
                missing = (("prelude-error-code", "adapter_not_received"), ("prelude-http-status", "422"))
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "received 0 bytes", trailing_metadata=missing)
            content = await asyncio.to_thread(Path(begin.path).read_bytes)
        is_late = await self._sleep(self.put_delay_s, begin.deadline_s)
        if self.put_errors:
            await context.abort(self.put_errors.pop(0), "no")
        if is_late:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        digested = header if b'"format":"prelude-packed-2"' in header else content
        assert hashlib.sha256(digested).hexdigest() == begin.content_sha256
        assert begin.content_bytes == len(content)
        assert all(len(part.chunk) <= 1024**2 for part in parts)
        self.num_chunks = len(parts) - 1
        was_pinned = begin.revision_id in self.kept
        self.memory_only[begin.revision_id] = content
        self.kept.add(begin.revision_id)
        self.resident.add(begin.revision_id)
        if self.reports_residency:
            ids = [begin.revision_id]
            await self.send_delta(in_memory_only=ids, resident=ids, kept=ids)
        return control.PutAdapterResponse(was_pinned=was_pinned)

    async def _sleep(self, seconds: float, deadline_s: float) -> bool:
        """Simulate work. True if the deadline ended it; agents then report the cause, slightly after the deadline."""
        is_late = self.keeps_deadlines and seconds > deadline_s
        await asyncio.sleep(deadline_s + 0.05 if is_late else seconds)
        return is_late

    async def evict_memory_only(self, revision_id: str) -> None:
        """Drop a memory-only revision, as agents do to make room."""
        del self.memory_only[revision_id]
        self.kept.discard(revision_id)
        self.resident.discard(revision_id)
        await self.send_delta(not_in_memory_only=[revision_id], evicted=[revision_id], not_kept=[revision_id])

    async def PinAdapter(self, request: Any, context: Any) -> control.PinAdapterResponse:
        (self.kept.add if request.pinned else self.kept.discard)(request.revision_id)
        (self.pinned if request.pinned else self.unpinned).append(request.revision_id)
        if self.reports_residency:
            await self.send_delta(**{"kept" if request.pinned else "not_kept": [request.revision_id]})
        return control.PinAdapterResponse()

    async def EvictAdapter(self, request: Any, context: Any) -> control.EvictAdapterResponse:
        if request.revision_id in self.kept:
            metadata = (("prelude-error-code", "adapter_in_use"), ("prelude-http-status", "409"))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is pinned", trailing_metadata=metadata)
        self.evicted.append((request.revision_id, request.from_disk))
        was_there = request.revision_id in self.resident
        self.resident.discard(request.revision_id)
        await self.send_delta(evicted=[request.revision_id])
        return control.EvictAdapterResponse(evicted=was_there)

    async def ChangeRole(self, request: Any, context: Any) -> control.ChangeRoleResponse:
        role = control.Role.Name(request.role).removeprefix("ROLE_").lower()
        self.asked_roles.append(role)
        self.role_request = request
        if self.state.draining:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is changing its role")
        await self.change(draining=True, gives_back=request.give_back_after_s > 0)
        await self.may_end.wait()
        if self.role_errors:
            await self.change(draining=False, gives_back=False)
            await context.abort(self.role_errors.pop(0), "no")
        self._changing = asyncio.create_task(self._become(role))
        return control.ChangeRoleResponse()

    async def _become(self, role: str) -> None:
        """End, for an agent of another role at the same address."""
        assert self._server is not None
        await self._server.stop(0.2)  # for the answer to this call
        self.role, self.agent_id = role, f"{self.agent_id}'"
        await self.restart_agent()
        await self.change(draining=False, gives_back=False, incarnation=f"{self.state.incarnation}'")

    async def make_resident(self, revision_id: str) -> None:
        self.resident.add(revision_id)
        await self.send_delta(resident=[revision_id])

    async def send_delta(self, **delta: Any) -> None:
        """Send a change of residency."""
        self._deltas.append(control.ResidencyDelta(**delta))
        await self.change()
