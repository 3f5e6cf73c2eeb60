"""Serves a stand-in of an agent's control service in a thread, for tests of commands that call it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server


@contextmanager
def served(agent: WorkerControlServicer, address: str = "127.0.0.1:0") -> Iterator[int]:
    """The port of an agent that listens in its own thread."""
    started, ports = threading.Event(), []

    async def serve() -> None:
        server = grpc.aio.server()
        add_WorkerControlServicer_to_server(agent, server)
        ports.append(server.add_insecure_port(address))
        await server.start()
        started.set()
        await asyncio.to_thread(stop.wait)
        await server.stop(0)

    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield ports[0]
    finally:
        stop.set()
        thread.join()
