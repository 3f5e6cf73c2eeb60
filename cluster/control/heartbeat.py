"""Reads a worker's control stream and detects a silent worker."""

from __future__ import annotations

import asyncio

from cluster.control import control_pb2 as pb

MISSED_HEARTBEATS = 3


async def next_state(stream, heartbeat_s: float) -> pb.WorkerState:
    """The stream's next message, or `grpc.aio.EOF` at its end. Raises TimeoutError if the worker is silent.

    Waits several heartbeats instead of one long timeout: after this process or the machine was suspended, a single
    timeout would expire before the messages that have already arrived are read.
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
