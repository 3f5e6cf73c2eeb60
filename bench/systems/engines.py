"""Engines for a benchmark: started as workers start them, without agents, ended with the benchmark."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from bench.errors import SystemFailed
from bench.options import Options
from cluster.local import shared_memory
from engine.arguments import AdapterSlots, EngineSpec
from engine.client import EngineClient
from engine.errors import EngineError
from engine.supervisor import EngineSnapshot, EngineStatus, EngineSupervisor

_START_TIMEOUT_S = 600.0
_LOAD_TIMEOUT_S = 120.0
_NOTICE_S = 1.0  # for a supervisor to notice that its engine is dead
HOST = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def engine_spec(
    role: str, model_path: Path, adapters: AdapterSlots | None, options: Options, scratch: Path
) -> EngineSpec:
    """The same settings for every engine that is compared, but for its role and its adapters."""
    shape = options.shape
    return EngineSpec(
        role=role,
        device=options.device,
        model_path=model_path,
        served_name="bench",
        dtype="bfloat16",
        host=HOST,
        port=free_port(),
        bootstrap_port=free_port() if role == "prefill" else None,
        # All requests at once, and what the prefix cache holds.
        max_total_tokens=max(16384, 5 * shape.concurrency * (shape.prompt_tokens + shape.generated_tokens) // 4),
        max_running_requests=2 * shape.concurrency,
        chunked_prefill_tokens=2048 if options.device == "cpu" else 8192,
        context_length=None,
        tensor_parallel=1,
        tool_call_parser=None,
        reasoning_parser=None,
        adapters=adapters,
        extra_arguments=options.engine_arguments,
        scratch=scratch,
    )


@contextlib.asynccontextmanager
async def running_engine(spec: EngineSpec) -> AsyncIterator[EngineSnapshot]:
    """An engine that is up. Raises SystemFailed when it does not start; it is not started again when it dies."""
    settled: asyncio.Future[EngineSnapshot] = asyncio.get_running_loop().create_future()

    def on_change(snapshot: EngineSnapshot) -> None:
        if snapshot.status in (EngineStatus.UP, EngineStatus.DOWN) and not settled.done():
            settled.set_result(snapshot)

    segments_before = shared_memory.segments()
    supervisor = EngineSupervisor(spec, _START_TIMEOUT_S, on_change)
    running = asyncio.create_task(supervisor.run(), name=f"engine {spec.role}")
    either: set[asyncio.Future[Any]] = {settled, running}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not settled.done() or settled.result().status is not EngineStatus.UP:
            raise SystemFailed(f"the {spec.role} engine did not start: {supervisor.snapshot.reason}")
        incarnation = settled.result().incarnation
        try:
            yield settled.result()
        except SystemFailed as error:  # perhaps because of what the supervisor is about to notice
            await asyncio.sleep(_NOTICE_S)
            if supervisor.snapshot.incarnation != incarnation:
                raise _died(spec, supervisor) from error
            raise
        if supervisor.snapshot.incarnation != incarnation:
            raise _died(spec, supervisor)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for path in shared_memory.segments() - segments_before:
            shared_memory.remove_if_abandoned(path)


def _died(spec: EngineSpec, supervisor: EngineSupervisor) -> SystemFailed:
    return SystemFailed(f"the {spec.role} engine died on the way: {supervisor.snapshot.reason}")


async def load_adapters(spec: EngineSpec, revisions: dict[str, Path]) -> None:
    """Make the engine hold every revision in host memory. Raises SystemFailed."""
    client = EngineClient(spec.url)
    try:
        for revision_id, directory in revisions.items():
            await client.load_adapter(revision_id, directory, _LOAD_TIMEOUT_S)
    except EngineError as error:
        raise SystemFailed(f"the {spec.role} engine did not load an adapter: {error}") from error
    finally:
        await client.aclose()
