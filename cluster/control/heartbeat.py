"""Reading a worker's control stream, and telling silence from having been away."""

from __future__ import annotations

import asyncio

from cluster.control import control_pb2 as pb

MISSED_HEARTBEATS = 3


async def next_state(stream, heartbeat_s: float) -> pb.WorkerState:
    """The stream's next message, `grpc.aio.EOF` at its end. Raises TimeoutError when the worker is silent.

    Silence is counted in heartbeats that we were awake for: when this process, or the whole machine, has been
    stopped for a while, one long wait would be over before the messages that are already here are read.
    """
    read = asyncio.ensure_future(stream.read())
    try:
        for _ in range(MISSED_HEARTBEATS):
            done, _ = await asyncio.wait([read], timeout=heartbeat_s)
            if done:
                return read.result()
    finally:
        read.cancel()
    raise TimeoutError(f"silent for {MISSED_HEARTBEATS} heartbeats")
