"""Starts the systems that the adapter-tax benchmark compares, with the same model, settings and adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterError
from adapters.model.base_model import MODULES, BaseModel
from bench.errors import SystemFailed
from bench.load.options import Endpoint, Engine, Prefill
from bench.options import DTYPE, Options
from bench.systems.adapter_set import PreparedAdapter, adapters_folder, prepare_adapters
from bench.systems.engines import HOST, engine_spec, load_adapters, running_engine
from bench.systems.models import write_model
from bench.systems.systems import SERVED_MODEL, CalledSystem, System
from cluster.config.schema import ClusterConfig
from cluster.errors import StartError
from cluster.local.supervisor import local_cluster
from engine.arguments import AdapterSlots

MIXED = "unified_lora"  # behind its adapters it has the same ones for all positions, if there are `all_shares`
_PACKED = frozenset({"serving"})
_KINDS = {"stock": "lora", "unified_lora": "lora", "unified_direft": "direft", "pd": "lora"}
# SGLang requires LoRA buffers for at least one projection, even for ReFT only.
_MODULES = {"lora": MODULES, "direft": ("o_proj",)}
_ROLES = {"none": "stock", "stock": "stock", "unified_lora": "unified", "unified_direft": "unified"}


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts systems, which the stack stops."""

    options: Options
    folder: Path
    stack: contextlib.AsyncExitStack

    async def start_all(self, progress: Callable[[str], None]) -> tuple[BaseModel, list[System]]:
        """Start every requested system, with its adapters in host memory. Raises SystemFailed."""
        progress("Creating the model and the adapters.")
        options = self.options
        await asyncio.to_thread(write_model, options.model, self._model, options.device, options.engine_arguments)
        base = BaseModel.read(self._model)
        adapters: dict[str, list[PreparedAdapter]] = {}
        everywhere: list[PreparedAdapter] = []
        folder = self.stack.enter_context(adapters_folder(options.device, self.folder))
        for kind in sorted({_KINDS[name] for name in self.options.systems if name in _KINDS}):
            count = max(self.options.adapters)
            forms = frozenset(self._form_for(name) for name in self.options.systems if _KINDS.get(name) == kind)
            try:
                adapters[kind] = await asyncio.to_thread(
                    prepare_adapters, kind, self._rank(kind), count, base, DTYPE, folder, forms
                )
                if kind == "lora" and options.all_shares:
                    everywhere = await asyncio.to_thread(
                        prepare_adapters, kind, options.lora_rank, count, base, DTYPE, folder, _PACKED, "all"
                    )
            except AdapterError as error:
                raise SystemFailed(f"the {kind} adapters cannot be created: {error}") from error
        systems: dict[str, System] = {}

        async def start(name: str) -> None:
            progress(f"Starting {name}.")
            own = adapters[_KINDS[name]] if name in _KINDS else []
            systems[name] = await self._start(name, [*own, *everywhere] if name == MIXED else own)

        first, *others = self.options.systems
        await start(first)  # on a GPU it compiles kernels, which the others reuse
        if self.options.device == "cpu":
            for name in others:
                await start(name)
        else:
            await asyncio.gather(*(start(name) for name in others))
        return base, [systems[name] for name in self.options.systems]

    def _rank(self, kind: str) -> int:
        return self.options.lora_rank if kind == "lora" else self.options.reft_rank

    def _form_for(self, system: str) -> str:
        """Stock SGLang reads PEFT files, and so do agents, which pack them; our engines read packed files."""
        through_agents = system == "pd" and self.options.pd_through == "router"
        return "source" if system == "stock" or through_agents else "serving"

    async def _start(self, name: str, adapters: list[PreparedAdapter]) -> System:
        system = CalledSystem(name, await self._endpoint(name, adapters))
        await self.stack.enter_async_context(system.client)
        return system

    async def _endpoint(self, name: str, adapters: list[PreparedAdapter]) -> Endpoint:
        revisions = tuple(adapter.revision_id for adapter in adapters)
        if name != "pd":
            url, _ = await self._engine(_ROLES[name], name, adapters)
            return Endpoint(url, SERVED_MODEL, revisions, "lora_path" if revisions else "none")
        if self.options.pd_through == "router":
            return Endpoint(await self._cluster(adapters), SERVED_MODEL, tuple(each.name for each in adapters))
        prefill_url, kv_port = await self._engine("prefill", "prefill", adapters)
        decode_url, _ = await self._engine("decode", "decode", [])
        assert kv_port is not None
        pair = Engine(decode_url, Prefill(prefill_url, HOST, kv_port))
        return Endpoint(decode_url, SERVED_MODEL, revisions, "lora_path", engines=(pair,))

    async def _engine(self, role: str, name: str, adapters: list[PreparedAdapter]) -> tuple[str, int | None]:
        """Start an engine with its adapters; its URL and, for a prefill engine, its bootstrap port."""
        kind = _KINDS.get(name, "lora")
        slots = AdapterSlots(self.options.num_slots, self._rank(kind), _MODULES[kind]) if adapters else None
        spec = engine_spec(role, self._model, slots, self.options, self.folder / f"engine-{name}")
        await self.stack.enter_async_context(running_engine(spec))
        is_source = self._form_for(name) == "source"
        await load_adapters(spec, {each.revision_id: each.source if is_source else each.serving for each in adapters})
        return spec.url, spec.bootstrap_port

    async def _cluster(self, adapters: list[PreparedAdapter]) -> str:
        """Start a whole cluster with the adapters in its `cluster.yaml`; its router's URL."""
        like = engine_spec("decode", self._model, None, self.options, self.folder)
        config = ClusterConfig.model_validate(
            {
                "model": {"path": self._model, "name": like.served_name, "dtype": like.dtype},
                "engine": {
                    "device": like.device,
                    "max_total_tokens": like.max_total_tokens,
                    "max_running_requests": like.max_running_requests,
                    "chunked_prefill_tokens": like.chunked_prefill_tokens,
                    "extra_arguments": list(like.extra_arguments),
                },
                "router": {"port": 0},
                "workers": {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}},
                "adapter_limits": {"max_rank": self.options.lora_rank, "slots": self.options.num_slots},
                "adapters": {adapter.name: {"path": adapter.source} for adapter in adapters},
            }
        )
        try:
            cluster = await self.stack.enter_async_context(local_cluster(config, self.folder / "logs"))
        except StartError as error:
            raise SystemFailed(str(error)) from error
        return cluster.url

    @property
    def _model(self) -> Path:
        return self.folder / "model"
