"""Starts the systems of a matrix, with the same model, adapters and settings, and checks that adapters act on each."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from adapters.errors import AdapterError
from adapters.model.base_model import MODULES, BaseModel
from bench import options as engine_options
from bench.adapter_tax import check_that_adapters_act
from bench.errors import SystemFailed
from bench.load.options import Endpoint, Engine, Prefill
from bench.matrix.options import PAIRS, Options
from bench.options import DTYPE, Shape
from bench.systems.adapter_set import PreparedAdapter, adapters_folder, prepare_adapters
from bench.systems.engines import HOST, engine_spec, load_adapters, running_engine
from bench.systems.models import write_model
from bench.systems.systems import SERVED_MODEL, CalledSystem, System
from bench.workloads.workload import Stream
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.gpus import list_gpus
from cluster.local.supervisor import local_cluster
from engine.arguments import AdapterSlots, EngineSpec
from process.free_ports import free_port

_MAX_TOTAL_TOKENS = {"cpu": 65536, "cuda": 131072}
_OPEN_CONCURRENCY = 32  # that an open loop is expected to reach
_SIZED_BY = 64  # requests of each cell from which the largest is taken
_CHECK_PROMPT_TOKENS = 32
_CHECK_TOKENS = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Started:
    """A system that runs."""

    name: str
    endpoint: Endpoint
    parts: tuple[System, ...]  # each takes requests by itself


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts systems, which the stack stops."""

    options: Options
    folder: Path
    stack: contextlib.AsyncExitStack
    gpus: tuple[int, ...] = ()  # by index on this host; (): that which this process sees first

    async def start_all(self, progress: Callable[[str], None]) -> tuple[BaseModel, list[Started]]:
        """Start every system, one after the other, with its adapters in host memory. Raises SystemFailed."""
        options = self.options
        progress("creating the model and the adapters")
        await asyncio.to_thread(write_model, options.model, self._model, options.device, options.engine_arguments)
        base = BaseModel.read(self._model)
        adapters: list[PreparedAdapter] = []
        forms = frozenset(form for name in options.systems if (form := self._form_for(name)))
        if forms:
            count, folder = options.max_adapters, self.stack.enter_context(adapters_folder(options.device, self.folder))
            try:
                adapters = await asyncio.to_thread(
                    prepare_adapters, "lora", options.lora_rank, count, base, DTYPE, folder, forms
                )
            except AdapterError as error:
                raise SystemFailed(f"the adapters cannot be created: {error}") from error
        started = []
        for name in options.systems:
            progress(f"starting {name}")
            started.append(await self._start(name, adapters))
            await self._check(started[-1], base.vocabulary)
        return base, started

    async def _check(self, system: Started, vocabulary: int) -> None:
        """A silently dropped adapter would look fast. It is also what loads them where a cluster does that."""
        shape = Shape(_CHECK_PROMPT_TOKENS, _CHECK_TOKENS, 1, 1)
        for part in system.parts:
            await check_that_adapters_act(part, self.options.num_checked, shape, vocabulary)

    def _form_for(self, name: str) -> str:
        """Stock SGLang reads PEFT files, and so do clusters, which pack them; our engines read packed files."""
        if name == "none":
            return ""
        return "source" if name.startswith("stock") or self.options.through == "router" else "serving"

    async def _start(self, name: str, adapters: list[PreparedAdapter]) -> Started:
        if self.options.through == "router" and name in ("unified", "pair"):
            return await self._start_cluster(name, adapters)
        names = tuple(each.revision_id for each in adapters)
        start = self._pair if name in PAIRS else self._single
        engines = await self._side_by_side(
            *(partial(start, name, number, adapters) for number in range(self._num_groups(name)))
        )
        field = "none" if name == "none" else "lora_path"
        # Names stay where no adapter is sent, so that all systems get the same requests.
        names = names or tuple(f"adapter-{number}" for number in range(self.options.max_adapters))
        endpoint = Endpoint(engines[0].url, SERVED_MODEL, names, field, engines=tuple(engines))
        parts = [
            await self._part(name, msgspec.structs.replace(endpoint, url=engine.url, engines=(engine,)))
            for engine in engines
        ]
        return Started(name, endpoint, tuple(parts))

    async def _part(self, name: str, endpoint: Endpoint) -> System:
        system = CalledSystem(name, endpoint)
        await self.stack.enter_async_context(system.client)
        return system

    def _num_groups(self, name: str) -> int:
        """Engines, or pairs of engines. On one GPU or a CPU, both engines of a pair share it."""
        return max(1, self.options.num_gpus // 2) if name in PAIRS else self.options.num_gpus

    async def _side_by_side(self, *starts: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
        """Start at the same time what has a GPU of its own. What shares one has to see what memory the others left."""
        if self.options.num_gpus == 1:
            return [await start() for start in starts]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(start()) for start in starts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _single(self, name: str, number: int, adapters: list[PreparedAdapter]) -> Engine:
        role = "unified" if name == "unified" else "stock"
        spec = self._spec(role, name, number, gpus=self.gpus[number : number + 1], has_adapters=name != "none")
        return Engine(await self._run(spec, name, adapters))

    async def _pair(self, name: str, number: int, adapters: list[PreparedAdapter]) -> Engine:
        own = self.gpus[2 * number : 2 * number + 2]
        is_stock = name == "stock_pd"
        roles = ("stock", "stock") if is_stock else ("prefill", "decode")
        prefill = self._spec(roles[0], f"{name}-prefill", number, gpus=own, has_adapters=True)
        decode = self._spec(roles[1], f"{name}-decode", number, gpus=own[::-1], has_adapters=is_stock)
        if is_stock:
            prefill = replace(
                prefill,
                bootstrap_port=free_port(),
                extra_arguments=(*_disaggregated("prefill"), *prefill.extra_arguments),
            )
            decode = replace(decode, extra_arguments=(*_disaggregated("decode"), *decode.extra_arguments))
        prefill_url, decode_url = await self._side_by_side(
            partial(self._run, prefill, name, adapters), partial(self._run, decode, name, adapters if is_stock else [])
        )
        assert prefill.bootstrap_port is not None
        return Engine(decode_url, Prefill(prefill_url, HOST, prefill.bootstrap_port), is_stock)

    def _spec(self, role: str, name: str, number: int, *, gpus: tuple[int, ...], has_adapters: bool) -> EngineSpec:
        options = self.options
        slots = AdapterSlots(options.num_slots, options.lora_rank, MODULES) if has_adapters else None
        spec = engine_spec(role, self._model, slots, self._engine_options(), self.folder / f"engine-{name}-{number}")
        return self._sized(replace(spec, visible_gpus=gpus))

    @property
    def max_total_tokens(self) -> int | None:
        """The KV cache of every engine."""
        return self._spec("decode", "", 0, gpus=(), has_adapters=False).max_total_tokens

    def _sized(self, spec: EngineSpec) -> EngineSpec:
        """All systems are up at a time, each with a KV cache of the same size, unless one runs alone on its GPUs."""
        assert spec.max_total_tokens is not None
        if self.options.is_alone and self.options.device != "cpu":
            return spec
        most = _MAX_TOTAL_TOKENS[self.options.device]
        return replace(spec, max_total_tokens=min(most, spec.max_total_tokens))

    def _engine_options(self) -> engine_options.Options:
        options = self.options
        prompt, output = largest_of(options)
        concurrency = max(cell.workload.concurrency or _OPEN_CONCURRENCY for cell in options.cells)
        return engine_options.Options(
            systems=(), adapters=(options.max_adapters,), repeats=1, num_slots=options.num_slots, pd_through="engines",
            shape=Shape(prompt, output, concurrency, 1), device=options.device,
            engine_arguments=options.engine_arguments,
        )  # fmt: skip

    async def _run(self, spec: EngineSpec, name: str, adapters: list[PreparedAdapter]) -> str:
        """Start an engine with its adapters; its URL."""
        await self.stack.enter_async_context(running_engine(spec))
        if spec.adapters is not None:
            is_source = self._form_for(name) == "source"
            await load_adapters(
                spec, {each.revision_id: each.source if is_source else each.serving for each in adapters}
            )
        return spec.url

    async def _start_cluster(self, name: str, adapters: list[PreparedAdapter]) -> Started:
        """A whole cluster with the adapters in its `cluster.yaml`."""
        like = self._spec("decode", name, 0, gpus=(), has_adapters=False)
        roles = ("prefill", "decode") if name == "pair" else ("unified",)
        gpu = {"gpus": 1} if self.options.num_gpus > 1 else {}
        workers = {
            f"{role}-{number}": {"role": role, **gpu} for number in range(self._num_groups(name)) for role in roles
        }
        config = ClusterConfig.model_validate(
            {
                "model": {"path": self._model, "name": SERVED_MODEL, "dtype": like.dtype},
                "engine": {
                    "device": like.device,
                    "max_total_tokens": like.max_total_tokens,
                    "max_running_requests": like.max_running_requests,
                    "chunked_prefill_tokens": like.chunked_prefill_tokens,
                    "extra_arguments": list(like.extra_arguments),
                },
                "router": {"port": 0},
                "workers": workers,
                "adapter_limits": {"max_rank": self.options.lora_rank, "slots": self.options.num_slots},
                "adapters": {each.name: {"path": each.source} for each in adapters},
            }
        )
        try:
            cluster = await self.stack.enter_async_context(local_cluster(config, self.folder / f"logs-{name}"))
        except StartError as error:
            raise SystemFailed(str(error)) from error
        names = tuple(each.name for each in adapters)
        endpoint = Endpoint(cluster.url, SERVED_MODEL, names, "adapter")
        return Started(name, endpoint, (await self._part(name, endpoint),))

    @property
    def _model(self) -> Path:
        return self.folder / "model"


def gpus_of(options: Options) -> tuple[int, ...]:
    """The GPUs of each system by index, if it has several: the first that this process may use. Raises SystemFailed."""
    if options.num_gpus == 1:
        return ()
    try:
        available = list_gpus(os.environ)
    except StartError as error:
        raise SystemFailed(str(error)) from error
    if len(available.gpus) < options.num_gpus:
        raise SystemFailed(f"--gpus {options.num_gpus}: this host has {available}. Ask for fewer")
    return tuple(gpu.index for gpu in available.gpus[: options.num_gpus])


def largest_of(options: Options) -> tuple[int, int]:
    """The most prompt and output tokens of a request, by the first ones of each cell. Two characters may be a token."""
    prompt = output = 1
    for cell in options.cells:
        stream = Stream(cell.workload, options.seed, cell.num_adapters)
        for session in islice(stream.sessions(None), _SIZED_BY):
            for request in session.requests:
                num_characters = sum(len(str(each)) for each in request.content.get("messages", ()))
                prompt = max(prompt, request.prompt_tokens or num_characters // 2)
                output = max(output, request.max_tokens)
    return prompt, output


def _disaggregated(mode: str) -> tuple[str, ...]:
    return ("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "nixl")
