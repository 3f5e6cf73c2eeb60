"""An agent's gRPC server."""

import contextlib
from collections.abc import AsyncIterable, AsyncIterator

import grpc

from adapters.errors import AdapterError
from adapters.store import Envelope
from cluster.control import control_pb2 as pb
from cluster.control.authorization import ENGINE_KEY_READERS, caller_of
from cluster.control.bounds import MAX_MESSAGE_BYTES
from cluster.control.checked_calls import CheckedCalls, discard
from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from cluster.control.worker import AdapterOperations, Worker
from cluster.errors import (
    ERROR_CODE_KEY,
    HTTP_STATUS_KEY,
    RETRY_AFTER_KEY,
    AdapterHolderBusy,
    RoleChangeRefused,
    StartError,
    WorkerStopping,
)
from engine.errors import EngineError
from process.addresses import host_and_port

_STOP_GRACE_S = 1.0
_DEADLINE_S = 60.0  # of calls that set none
_MAX_CALLS = 8192  # at once, over all connections: each router and peer has a stream, and calls that wait for loads


class ControlService(WorkerControlServicer):
    """Serves the control protocol for one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Describe(self, request, context) -> pb.WorkerDescription:
        description = self._worker.describe()
        transport = self._worker.transport
        if transport.is_secure:
            caller = caller_of(context)
            if caller is None or caller.role not in map(transport.certified_role, ENGINE_KEY_READERS):
                description.engine_key = ""
        return description

    async def WatchState(self, request, context) -> AsyncIterator[pb.WorkerState]:
        async for state in self._worker.hub.watch(request.heartbeat_s or 5.0, by_router=request.places_requests):
            yield state

    async def EnsureAdapter(self, request, context) -> pb.EnsureAdapterResponse:
        adapters = await self._adapters(context, refuse_if_draining=True)
        deadline_s = request.deadline_s or _DEADLINE_S
        async with _errors_as_grpc_status(context, f"the adapter was not resident within {deadline_s:g} s"):
            with self._worker.tracing.continued("EnsureAdapter", context.invocation_metadata()) as span:
                span.set({"prelude.worker": self._worker.name, "prelude.revision": request.revision_id})
                response = await adapters.ensure_adapter(request, deadline_s, span)
                span.set({"prelude.load_s": response.load_s})
                return response

    async def PinAdapter(self, request, context) -> pb.PinAdapterResponse:
        adapters = await self._adapters(context, refuse_if_draining=request.pinned)
        deadline_s = request.deadline_s or _DEADLINE_S
        async with _errors_as_grpc_status(context, f"the adapter was not resident within {deadline_s:g} s"):
            await adapters.pin_adapter(request.revision_id, request.pinned, deadline_s)
        return pb.PinAdapterResponse()

    async def PutAdapter(self, request_iterator, context) -> pb.PutAdapterResponse:
        parts = aiter(request_iterator)
        adapters = await self._adapters(context, refuse_if_draining=True, unread=parts)
        first = await anext(parts, pb.PutAdapterRequest())
        if first.WhichOneof("part") != "begin":
            await discard(parts)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be `begin`")
        deadline_s = first.begin.deadline_s or _DEADLINE_S
        begin = first.begin
        envelope = Envelope(begin.revision_id, begin.content_sha256, begin.content_bytes, begin.signature)
        async with _errors_as_grpc_status(context, f"the adapter was not received and loaded within {deadline_s:g} s"):
            try:
                response = await adapters.put_adapter(envelope, begin.path, _chunks(parts, context), deadline_s)
            except Exception:
                await discard(parts)
                raise
            await discard(parts)
            return response

    async def EvictAdapter(self, request, context) -> pb.EvictAdapterResponse:
        adapters = await self._adapters(context, refuse_if_draining=False)
        async with _errors_as_grpc_status(context, "the engine did not unload the adapter in time"):
            return pb.EvictAdapterResponse(evicted=await adapters.evict_adapter(request.revision_id, request.from_disk))

    async def _adapters(
        self, context, *, refuse_if_draining: bool, unread: AsyncIterable[pb.PutAdapterRequest] | None = None
    ) -> AdapterOperations:
        """The worker's adapter operations. Aborts the call if it has none, or drains and `refuse_if_draining`."""
        adapters = self._worker.adapters
        is_refused = adapters is None or (refuse_if_draining and self._worker.hub.state.draining)
        if is_refused and unread is not None:
            await discard(unread)
        if adapters is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"worker {self._worker.name} holds no adapters")
            raise AssertionError("abort raises")
        if refuse_if_draining and self._worker.hub.state.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {self._worker.name} is draining")
        return adapters

    async def Drain(self, request, context) -> pb.DrainResponse:
        return pb.DrainResponse(idle=await self._worker.drain(request.deadline_s or None))

    async def Undrain(self, request, context) -> pb.UndrainResponse:
        try:
            return pb.UndrainResponse(was_draining=self._worker.undrain())
        except WorkerStopping as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            raise AssertionError("abort raises") from error

    async def ChangeRole(self, request, context) -> pb.ChangeRoleResponse:
        try:
            role = pb.Role.Name(request.role).removeprefix("ROLE_").lower()
            await self._worker.change_role(
                role, request.deadline_s or None, request.give_back_after_s, even_last=request.even_last
            )
        except RoleChangeRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except TimeoutError as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        return pb.ChangeRoleResponse()


async def _chunks(parts: AsyncIterable[pb.PutAdapterRequest], context) -> AsyncIterator[bytes]:
    async for part in parts:
        if part.WhichOneof("part") != "chunk":
            await discard(parts)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "every message after the first must be a `chunk`")
        yield part.chunk


@contextlib.asynccontextmanager
async def _errors_as_grpc_status(context, on_timeout: str) -> AsyncIterator[None]:
    """Abort the call on an error, with a status that says whether, when and where to retry.

    RESOURCE_EXHAUSTED: this worker is out of capacity. UNAVAILABLE: a transient error of the adapter's store, with its
    code in the metadata, or of this worker's engine, without a code. FAILED_PRECONDITION: the adapter or the request
    is wrong, for every worker. DEADLINE_EXCEEDED: the call's deadline passed.
    """
    try:
        yield
    except AdapterHolderBusy as error:
        after = ((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), trailing_metadata=after)
    except AdapterError as error:
        details = ((ERROR_CODE_KEY, error.code), (HTTP_STATUS_KEY, str(error.http_status)))
        status = grpc.StatusCode.UNAVAILABLE if error.retryable else grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(status, str(error), trailing_metadata=details)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, on_timeout)
    except EngineError as error:
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))


@contextlib.asynccontextmanager
async def serve_control(worker: Worker) -> AsyncIterator[None]:
    """Serve the agent's control service on its control port. Raises StartError if that is taken."""
    server = grpc.aio.server(
        interceptors=[CheckedCalls(worker.transport.identity)],
        # gRPC shares ports by default: a second agent at this one would get a part of the calls.
        options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=_MAX_CALLS,
    )
    add_WorkerControlServicer_to_server(ControlService(worker), server)
    address = host_and_port(worker.worker.host, worker.worker.control_port)
    try:
        worker.transport.add_port(server, address)
    except RuntimeError as error:
        raise StartError(
            f"control_port: {address} is not available; another process has it, or this worker runs already"
        ) from error
    await server.start()
    try:
        yield
    finally:
        worker.hub.end()  # else the server waits for them, as an agent of another role for the port
        await server.stop(_STOP_GRACE_S)
