"""Runs engines for a benchmark, started as workers start them but without agents."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from adapters.model.serving import EngineDtype
from bench.errors import SystemFailed
from cluster.config.workers import EngineConfig
from cluster.local import shared_memory
from engine.arguments import AdapterSlots, EngineSpec
from engine.client import EngineClient
from engine.errors import EngineError
from engine.supervisor import EngineSnapshot, EngineStatus, EngineSupervisor
from process.free_ports import free_port

_START_TIMEOUT_S = 600.0
_LOAD_TIMEOUT_S = 120.0
_CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192}
_NOTICE_S = 1.0  # for a supervisor to notice that its engine is dead
HOST = "127.0.0.1"
DTYPE: EngineDtype = "bfloat16"


def engine_spec(
    role: str,
    model_path: Path,
    adapters: AdapterSlots | None,
    scratch: Path,
    *,
    request_tokens: int,
    concurrency: int,
    device: str = "cpu",
    chunk_tokens: int | None = None,
    tensor_parallel: int = 1,
    engine_arguments: tuple[str, ...] = (),
) -> EngineSpec:
    """An engine's settings. Compared engines differ in role and adapters only, and by role in their pages of KV.

    `request_tokens`: of the largest request, its answer included. `chunk_tokens`: of prompts per prefill batch.
    """
    chunk_tokens = chunk_tokens or _CHUNK_TOKENS[device]
    common = EngineConfig.model_validate({"device": device, "chunked_prefill_tokens": chunk_tokens})
    return EngineSpec(
        role=role,
        device=device,
        model_path=model_path,
        served_name="bench",
        dtype=DTYPE,
        host=HOST,
        port=free_port(),
        bootstrap_port=free_port() if role == "prefill" else None,
        # Room for all concurrent requests and for the prefix cache.
        max_total_tokens=max(16384, 5 * concurrency * request_tokens // 4),
        max_running_requests=2 * concurrency,
        chunked_prefill_tokens=chunk_tokens,
        kv_page_tokens=common.kv_page_tokens_of(role),
        context_length=None,
        tensor_parallel=tensor_parallel,
        tool_call_parser=None,
        reasoning_parser=None,
        adapters=adapters,
        extra_arguments=engine_arguments,
        scratch=scratch,
    )


@contextlib.asynccontextmanager
async def running_engine(spec: EngineSpec) -> AsyncIterator[EngineSnapshot]:
    """Run an engine during the context. Raises SystemFailed if it does not start, or dies."""
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
        except SystemFailed as error:  # perhaps the engine died, and the supervisor has not noticed yet
            await asyncio.sleep(_NOTICE_S)
            if supervisor.snapshot.incarnation != incarnation:
                raise _died(spec, supervisor) from error
            raise
        if supervisor.snapshot.incarnation != incarnation:
            raise _died(spec, supervisor)
    finally:
        own_segments = shared_memory.mapped_below(os.getpid())
        running.cancel()
        try:
            await asyncio.gather(running, return_exceptions=True)
        finally:
            shared_memory.remove_abandoned(shared_memory.segments() - segments_before, own_segments)


def _died(spec: EngineSpec, supervisor: EngineSupervisor) -> SystemFailed:
    return SystemFailed(f"the {spec.role} engine died during the benchmark: {supervisor.snapshot.reason}")


async def load_adapters(spec: EngineSpec, revisions: dict[str, Path]) -> None:
    """Load every revision into the engine's host memory. Raises SystemFailed."""
    client = EngineClient(spec.url)
    try:
        for revision_id, directory in revisions.items():
            await client.load_adapter(revision_id, directory, _LOAD_TIMEOUT_S)
    except EngineError as error:
        raise SystemFailed(f"the {spec.role} engine did not load an adapter: {error}") from error
    finally:
        await client.aclose()
