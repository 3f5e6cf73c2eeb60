"""A real SGLang engine for tests: started by the supervisor that agents use, in a thread of its own."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from support.in_thread import in_thread

from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.packed import write_for_engine
from engine.arguments import AdapterSlots, EngineSpec
from engine.supervisor import EngineSnapshot, EngineStatus, EngineSupervisor
from process.free_ports import free_port
from process.lifetime import meanwhile

# On a GPU machine: PRELUDE_TEST_DEVICE=cuda, and what its engines need beyond the tests' settings.
DEVICE = os.environ.get("PRELUDE_TEST_DEVICE", "cpu")
EXTRA_ARGUMENTS = tuple(os.environ.get("PRELUDE_TEST_ENGINE_ARGUMENTS", "").split())
TENSOR_PARALLEL = int(os.environ.get("PRELUDE_TEST_TENSOR_PARALLEL", "1"))  # of engines whose test names no size
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
START_TIMEOUT_S = 600.0  # on GPUs a first start compiles kernels, and half a core is slow


@dataclass(frozen=True)
class RunningEngine:
    """One engine that is up."""

    spec: EngineSpec
    cache: Path

    def load(self, directory: Path) -> str:
        """Load an adapter from a user's directory; its revision id."""
        base = BaseModel.read(self.spec.model_path)
        limits = Limits(max_rank=512, max_bytes=1 << 40, target_modules=MODULES)
        adapter = read_adapter(directory, base, limits)
        revision_id = revision_id_of(adapter)
        target = self.cache / revision_id.replace(":", "-")
        write_for_engine(adapter, base, self.spec.dtype, target)
        body = {"lora_name": revision_id, "lora_path": str(target)}
        answer = httpx.post(f"{self.spec.url}/load_lora_adapter", json=body, timeout=120)
        assert answer.json()["success"], answer.text
        return revision_id


def engine_spec(role: str, model: Path, scratch: Path, **changes) -> EngineSpec:
    """A small float32 engine."""
    spec = EngineSpec(
        role=role,
        device=DEVICE,
        model_path=model,
        served_name="demo",
        dtype="float32",
        host="127.0.0.1",
        port=free_port(),
        bootstrap_port=None,
        max_total_tokens=8192,
        max_running_requests=32,
        chunked_prefill_tokens=64,
        context_length=2048,
        tensor_parallel=TENSOR_PARALLEL,
        tool_call_parser=None,
        reasoning_parser=None,
        adapters=AdapterSlots(4, 64, MODULES),
        extra_arguments=EXTRA_ARGUMENTS,
        scratch=scratch,
    )
    return replace(spec, **changes)


@contextlib.asynccontextmanager
async def _supervised(spec: EngineSpec) -> AsyncIterator[None]:
    snapshots: asyncio.Queue[EngineSnapshot] = asyncio.Queue()
    async with meanwhile(EngineSupervisor(spec, START_TIMEOUT_S, snapshots.put_nowait).run()):
        while (now := await snapshots.get()).status is not EngineStatus.UP:
            assert now.status is not EngineStatus.DOWN, now.reason
        yield


@contextlib.contextmanager
def running_engine(spec: EngineSpec, cache: Path) -> Iterator[RunningEngine]:
    """The engine, up, for as long as the context lasts."""
    logging.getLogger("sglang").setLevel(logging.INFO)  # a failed test's report has what the engine printed
    with in_thread(_supervised(spec)):
        yield RunningEngine(spec, cache)
