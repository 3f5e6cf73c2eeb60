"""The gRPC face of an agent: control service and standard health."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from adapters.errors import AdapterError
from cluster import control_pb2 as pb
from cluster.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from cluster.errors import ERROR_CODE_KEY, HTTP_STATUS_KEY
from engine.errors import EngineError

if TYPE_CHECKING:
    from cluster.worker_agent import WorkerAgent

SERVICE = "prelude.control.v1.WorkerControl"
_STOP_GRACE_S = 1.0


class ControlService(WorkerControlServicer):
    """Translates control calls into the agent's words."""

    def __init__(self, agent: WorkerAgent) -> None:
        self._agent = agent

    async def Describe(self, request, context) -> pb.WorkerDescription:
        return self._agent.describe()

    async def WatchState(self, request, context) -> AsyncIterator[pb.WorkerState]:
        async for state in self._agent.hub.watch(request.heartbeat_s or 5.0):
            yield state

    async def EnsureAdapter(self, request, context) -> pb.EnsureAdapterResponse:
        agent = self._agent
        if agent.spec.adapters is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"worker {agent.name} holds no adapters")
        if agent.hub.state.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"worker {agent.name} is draining")
        deadline_s = request.deadline_s or 60.0
        try:
            async with asyncio.timeout(deadline_s):
                load_s = await agent.ensure_adapter(request.revision_id, deadline_s)
        except AdapterError as error:
            details = ((ERROR_CODE_KEY, error.code), (HTTP_STATUS_KEY, str(error.http_status)))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error), trailing_metadata=details)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"the adapter was not resident within {deadline_s:g} s"
            )
        except EngineError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.EnsureAdapterResponse(load_s=load_s)

    async def Drain(self, request, context) -> pb.DrainResponse:
        return pb.DrainResponse(idle=await self._agent.drain(request.deadline_s or 30.0))


@contextlib.asynccontextmanager
async def serve_control(agent: WorkerAgent) -> AsyncIterator[None]:
    """Serve the agent's control service and health on its control port."""
    server = grpc.aio.server()
    add_WorkerControlServicer_to_server(ControlService(agent), server)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    server.add_insecure_port(f"{agent.worker.host}:{agent.worker.control_port}")
    await server.start()
    follow = asyncio.create_task(_follow_health(agent, health_service), name="health")
    try:
        yield
    finally:
        follow.cancel()
        await server.stop(_STOP_GRACE_S)


async def _follow_health(agent: WorkerAgent, service: health.aio.HealthServicer) -> None:
    async for state in agent.hub.watch(heartbeat_s=3600.0):
        serving = state.ready and not state.draining
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await service.set(name, status)
