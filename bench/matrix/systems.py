"""Starts the systems of a matrix, with the same model, adapters and settings, and checks that adapters act on each."""

import asyncio
import contextlib
import math
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
from adapters.model.footprint import lora_bytes, reft_bytes
from adapters.model.normal_form import Positions
from bench.errors import SystemFailed
from bench.load.options import Endpoint, Engine, Prefill
from bench.matrix.options import OURS, REFT_RANK, SEED, Options
from bench.systems.adapter_set import PreparedAdapter, adapters_folder, prepare_adapters
from bench.systems.engines import DTYPE, HOST, engine_spec, load_adapters, running_engine
from bench.systems.models import write_model
from bench.systems.systems import SERVED_MODEL, check_that_adapters_act
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
# SGLang requires LoRA buffers for at least one projection, even for ReFT only.
_MODULES = {"lora": MODULES, "direft": ("o_proj",)}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts systems, which the stack stops."""

    options: Options
    folder: Path
    stack: contextlib.AsyncExitStack
    gpus: tuple[int, ...] = ()  # by index on this host; (): that which this process sees first

    async def start_all(self, progress: Callable[[str], None]) -> tuple[BaseModel, dict[str, Endpoint]]:
        """Start every system, one after the other, with its adapters in host memory; endpoints by name.

        Raises SystemFailed, or WrongAnswer if adapters do not act.
        """
        options = self.options
        progress("creating the model and the adapters")
        base = await self._write_model()
        adapters = await self._prepare(base)
        started = {}
        for name in options.systems:
            progress(f"starting {name}")
            started[name] = await self._start(name, adapters.get(_kind(name), []))
            await self._check(name, started[name], base.vocabulary)
        return base, started

    async def _write_model(self) -> BaseModel:
        options = self.options
        await asyncio.to_thread(write_model, options.model, self._model, options.device, options.engine_arguments)
        return BaseModel.read(self._model)

    async def _prepare(self, base: BaseModel) -> dict[str, list[PreparedAdapter]]:
        """By kind; behind those for the prompt, where a cell has some, the same ones for all positions."""
        options = self.options
        folder = self.stack.enter_context(adapters_folder(options.device, self.folder))
        adapters: dict[str, list[PreparedAdapter]] = {}
        every_position: tuple[Positions, ...] = ("prefill", "all") if options.has_all_positions else ("prefill",)
        for kind in sorted({_kind(name) for name in options.systems} - {""}):
            forms = frozenset(self._form_for(name) for name in options.systems if _kind(name) == kind)
            try:
                adapters[kind] = [
                    each
                    for positions in every_position
                    for each in await asyncio.to_thread(
                        prepare_adapters, kind, self._rank(kind), options.max_adapters, base, DTYPE, folder, forms,
                        positions,
                    )
                ]  # fmt: skip
            except AdapterError as error:
                raise SystemFailed(f"the {kind} adapters cannot be created: {error}") from error
        return adapters

    def _rank(self, kind: str) -> int:
        return REFT_RANK if kind == "direft" else self.options.lora_rank

    async def _check(self, name: str, endpoint: Endpoint, vocabulary: int) -> None:
        """A silently dropped adapter would look fast. Each engine is asked; a cluster loads its adapters meanwhile."""
        count, checked = self.options.max_adapters, range(self.options.num_checked)
        everywhere = [count + number for number in checked if len(endpoint.adapters) > count]
        for engine in endpoint.engines or (Engine(endpoint.url),):
            alone = msgspec.structs.replace(endpoint, engines=(engine,))
            await check_that_adapters_act(name, alone, (*checked, *everywhere), vocabulary)

    def _form_for(self, name: str) -> str:
        """Stock SGLang reads PEFT files, and so do clusters, which pack them; our engines read packed files."""
        return "source" if name.startswith("stock") or self.options.through == "router" else "serving"

    async def _start(self, name: str, adapters: list[PreparedAdapter]) -> Endpoint:
        if name.startswith("stock"):  # its adapters always act at all positions
            adapters = adapters[: self.options.max_adapters]
        if self.options.through == "router" and name in OURS:
            return await self._start_cluster(name, adapters)
        names = tuple(each.revision_id for each in adapters)
        engines = await self._engines(name, adapters)
        field = "none" if name == "none" else "lora_path"
        # Names stay where no adapter is sent, so that all systems get the same requests.
        names = names or tuple(f"adapter-{number}" for number in range(self.options.max_adapters))
        return Endpoint(engines[0].url, SERVED_MODEL, names, field, engines=engines)

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

    async def _engines(self, name: str, adapters: list[PreparedAdapter]) -> tuple[Engine, ...]:
        """The engines that take turns: of prefill and decode engines every pair, each equally often."""
        layout = self.options.layout_of(name)
        specs = [self._engine(name, number, role) for number, role in enumerate(layout.roles)]
        urls = await self._side_by_side(
            *(partial(self._run, spec, name, adapters if spec.adapters is not None else []) for spec in specs)
        )
        if not layout.prefill:
            return tuple(Engine(url) for url in urls)
        prefills = [
            Prefill(url, HOST, spec.bootstrap_port)
            for url, spec in zip(urls, specs, strict=True)
            if spec.bootstrap_port is not None
        ]
        decodes, has_adapters = urls[layout.prefill :], specs[-1].adapters is not None
        return tuple(
            Engine(decodes[turn % layout.decode], prefills[turn % layout.prefill], has_adapters)
            for turn in range(math.lcm(layout.prefill, layout.decode))
        )

    def _engine(self, name: str, number: int, role: str) -> EngineSpec:
        """One engine of a system that runs without a router, on its own GPUs."""
        ranks, is_ours, is_split = self.options.tensor_parallel, name in OURS, role != "unified"
        gpus = self.gpus[ranks * number : ranks * (number + 1)]
        if is_split:  # each sees its peers', which NVLink needs
            gpus += tuple(each for each in self.gpus if each not in gpus)
        kind = "" if is_ours and role == "decode" else _kind(name)
        label = f"{name}-{role}" if is_split else name
        spec = self._spec(role if is_ours else "stock", label, number, gpus=gpus, kind=kind)
        if is_ours or not is_split:
            return spec
        return replace(
            spec,
            bootstrap_port=free_port() if role == "prefill" else None,
            extra_arguments=(*_disaggregated(role), *spec.extra_arguments),
        )

    def _spec(self, role: str, name: str, number: int, *, gpus: tuple[int, ...] = (), kind: str = "") -> EngineSpec:
        """An engine with slots for adapters of this kind, if any."""
        slots = AdapterSlots(self.options.num_slots, self._rank(kind), _MODULES[kind]) if kind else None
        options = self.options
        spec = engine_spec(
            role,
            self._model,
            slots,
            self.folder / f"engine-{name}-{number}",
            request_tokens=sum(largest_of(options)),
            concurrency=max(cell.concurrency or _OPEN_CONCURRENCY for cell in options.cells),
            device=options.device,
            chunk_tokens=options.chunk_tokens,
            tensor_parallel=options.tensor_parallel,
            engine_arguments=options.engine_arguments,
        )
        return self._sized(replace(spec, visible_gpus=gpus))

    @property
    def max_total_tokens(self) -> int | None:
        """The KV cache of every engine."""
        return self._spec("decode", "", 0).max_total_tokens

    def _sized(self, spec: EngineSpec) -> EngineSpec:
        """All systems are up at a time, each with a KV cache of the same size, unless one runs alone on its GPUs."""
        assert spec.max_total_tokens is not None
        if self.options.layout is not None and self.options.device != "cpu":
            return spec
        most = _MAX_TOTAL_TOKENS[self.options.device]
        return replace(spec, max_total_tokens=min(most, spec.max_total_tokens))

    async def _run(self, spec: EngineSpec, name: str, adapters: list[PreparedAdapter]) -> str:
        """Start an engine with its adapters; its URL."""
        await self.stack.enter_async_context(running_engine(spec))
        if spec.adapters is not None:
            is_source = self._form_for(name) == "source"
            await load_adapters(
                spec, {each.revision_id: each.source if is_source else each.serving for each in adapters}
            )
        return spec.url

    async def _start_cluster(self, name: str, adapters: list[PreparedAdapter]) -> Endpoint:
        """A whole cluster with the adapters in its `cluster.yaml`."""
        like = self._spec("decode", name, 0)
        gpu = {"gpus": self.options.tensor_parallel} if self.options.num_gpus > 1 else {}
        roles = self.options.layout_of(name).roles
        workers = {f"{role}-{number}": {"role": role, **gpu} for number, role in enumerate(roles)}
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
                "adapter_limits": {"max_rank": self._rank(_kind(name)), "slots": self.options.num_slots},
                "residency": self._residency(_kind(name)),
                "adapters": {each.name: {"path": each.source} for each in adapters},
            }
        )
        try:
            cluster = await self.stack.enter_async_context(local_cluster(config, self.folder / f"logs-{name}"))
        except StartError as error:
            raise SystemFailed(str(error)) from error
        names = tuple(each.name for each in adapters)
        return Endpoint(cluster.url, SERVED_MODEL, names, "adapter")

    def _residency(self, kind: str) -> dict[str, int]:
        """Host memory for as many adapters as the options say. Half of one more: packed files have a header, too."""
        if self.options.host_adapters is None:
            return {}
        base, rank = BaseModel.read(self._model), self._rank(kind)
        one = reft_bytes(base, rank, DTYPE) if kind == "direft" else lora_bytes(base, rank, MODULES, DTYPE)
        return {"host_bytes": self.options.host_adapters * one + one // 2}

    @property
    def _model(self) -> Path:
        return self.folder / "model"


def _kind(name: str) -> str:
    """Of a system's adapters; empty for none."""
    return "" if name == "none" else "direft" if name == "unified_direft" else "lora"


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
        stream = Stream(cell, SEED, cell.num_adapters)
        for session in islice(stream.sessions(None), _SIZED_BY):
            for request in session.requests:
                num_characters = sum(len(str(each)) for each in request.content.get("messages", ()))
                prompt = max(prompt, request.prompt_tokens or num_characters // 2)
                output = max(output, request.max_tokens)
    return prompt, output


def _disaggregated(mode: str) -> tuple[str, ...]:
    return ("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "nixl")
