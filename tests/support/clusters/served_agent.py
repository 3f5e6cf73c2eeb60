"""Serves a stand-in of an agent's control service."""

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager

import grpc
from support.in_thread import in_thread

from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server


@asynccontextmanager
async def serving(agent: WorkerControlServicer, address: str) -> AsyncIterator[int]:
    """Its port."""
    server = grpc.aio.server()
    add_WorkerControlServicer_to_server(agent, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)


def served(agent: WorkerControlServicer, address: str = "127.0.0.1:0") -> AbstractContextManager[int]:
    """The port of an agent that listens in its own thread, for tests of commands that call it."""
    return in_thread(serving(agent, address))
