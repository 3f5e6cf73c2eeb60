"""Writes a first `cluster.yaml` for a model and a host, with every number explained. Behind `prelude init`."""

import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml

from adapters.model.footprint import ITEM_BYTES, expert_bytes
from cluster.config.schema import AdapterLimits
from cluster.errors import ConfigError
from cluster.host_memory import available_bytes, gib, part_for_adapters
from cluster.local.memory_plan import CPU_SHARE, GPU_SHARE, MIN_TOKENS, ModelSizes, can_divide, engine_memory

_TYPICAL_RANK = 16
_MAX_CPU_TOKENS = 32768  # of KV, which is plenty for the speed of a CPU
_MIN_SPLIT = 4  # workers: with fewer, one role or the other has too many
_SIZES = (1, 2, 4, 8, 16)  # of tensor parallelism, to suggest
_MAX_RUNNING = {"cpu": 32, "cuda": 256}
_CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True, slots=True)
class Host:
    """The memory of a host. `gpu_bytes`: of its smallest GPU; None if unknown."""

    num_gpus: int
    gpu_bytes: int | None
    free_bytes: int
    shared_bytes: int  # free in /dev/shm, where workers keep adapters
    gpu_name: str = ""  # as nvidia-smi shows it

    @classmethod
    def this(cls, num_gpus: int, gpu_bytes: int | None, gpu_name: str = "") -> Self:
        """This machine, with these GPUs."""
        free = available_bytes()
        if free is None:
            free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        shared = os.statvfs("/dev/shm")
        return cls(num_gpus, gpu_bytes, free, shared.f_bavail * shared.f_frsize, gpu_name)


@dataclass(frozen=True, slots=True)
class Pools:
    """How many workers of each role, and the GPUs of each."""

    prefill: int
    decode: int
    unified: int
    tensor_parallel: int

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.unified

    @classmethod
    def chosen(
        cls,
        num_gpus: int,
        tensor_parallel: int,
        unified: bool,
        with_all_positions: bool = False,
        split: Callable[[int], tuple[int, int, int] | None] = lambda num_workers: None,
    ) -> Self:
        """One unified worker on one GPU, half prefill and half decode on more; `unified`: no others.

        `split` divides four workers and more on GPUs among prefill, decode and unified ones, instead of halves.
        Adapters that act on all positions get one unified worker beside pairs. Raises ConfigError if not one worker
        fits.
        """
        fit = num_gpus // tensor_parallel if num_gpus else 1
        if not fit:
            raise ConfigError(
                f"--tensor-parallel {tensor_parallel} needs as many GPUs, but there are {num_gpus}; ask for a smaller "
                "one, or another number of --gpus"
            )
        beside = int(with_all_positions)
        if unified or (num_gpus and fit < 2 + beside):
            return cls(0, 0, fit, tensor_parallel)
        paired = fit - beside
        halves = max(1, paired // 2), max(1, paired - paired // 2), 0
        parts = (split(paired) if paired >= _MIN_SPLIT else None) or halves
        return cls(parts[0], parts[1], parts[2] + beside, tensor_parallel)


def initial_config(model: Path, sizes: ModelSizes, host: Host, pools: Pools) -> str:
    """The text of cluster.yaml. Raises ConfigError with the arithmetic if the model or no adapter fits."""
    device = "cuda" if host.num_gpus else "cpu"
    limits = AdapterLimits()
    tp, all_slots = pools.tensor_parallel, (limits.slots + 1) * sizes.adapter_bytes(limits.max_rank)
    holders, typical = pools.prefill + pools.unified, sizes.adapter_bytes(_TYPICAL_RANK)
    host_bytes = part_for_adapters(host.shared_bytes, host.free_bytes, holders)
    share = (
        f"half of /dev/shm's free {gib(host.shared_bytes)} or a quarter of the free memory ({gib(host.free_bytes)}), "
        f"whichever is less, divided by {holders}"
    )
    if host_bytes < typical:
        raise ConfigError(
            f"no adapter fits in host memory: one of rank {_TYPICAL_RANK} on all projections is {gib(typical)}, and "
            f"each worker that holds adapters has {gib(host_bytes)}: {share}. Give this host more shared memory "
            "(docker: --shm-size; a Pod: an emptyDir of memory at /dev/shm), or start fewer such workers"
        )
    tokens = {role: _tokens(sizes, host, pools, slots) for role, slots in (("adapters", all_slots), ("decode", 0))}
    base = sizes.base
    lines = [
        f"# A cluster for {base.architecture} on {_where(host)}, written by `prelude init`.",
        "# `prelude up --config THIS_FILE` starts it. cluster/config/ documents every field.",
        "",
        "model:",
        f"  path: {_scalar(str(model.resolve()))}",
        f"  name: {_scalar(name_of(model))}  # the base model's name in requests",
        f"  dtype: {sizes.dtype}  # the checkpoint's; weights are {gib(sizes.weight_bytes)}, by {sizes.weights_from}",
        "  # tool_call_parser: NAME  # SGLang's name of the model's format for tool calls, such as qwen25 or llama3",
        "",
        "engine:",
        f"  device: {device}",
        *_comment(
            f"KV of one token: 2 x {base.num_layers} layers x {base.kv_heads} KV heads x {base.head_dim} x "
            f"{ITEM_BYTES[sizes.dtype]} bytes = {sizes.kv_bytes_per_token} bytes"
            f"{f', {sizes.kv_bytes_per_token_and_rank(tp)} per GPU' if tp > 1 else ''}.",
            "  ",
        ),
        *_tokens_lines(tokens["adapters"], "  "),
        f"  max_running_requests: {_MAX_RUNNING[device]}  # at once, per engine; the rest waits",
        f"  chunked_prefill_tokens: {_CHUNK_TOKENS[device]}  # of prompts, per prefill batch",
        *(
            [f"  # context_length: {sizes.max_context}  # the model's own; less admits shorter requests only"]
            if sizes.max_context
            else []
        ),
        "",
        "workers:",
        *_workers(pools, device, tokens["decode"]),
        "",
        "adapter_limits:",
        f"  max_rank: {limits.max_rank}",
        *_comment(
            f"Distinct adapters in one prefill batch. A slot of rank {limits.max_rank} is "
            f"{gib(sizes.adapter_bytes(limits.max_rank))}; {limits.slots} and one for the base model: "
            f"{gib(all_slots)}.",
            "  ",
        ),
        f"  slots: {limits.slots}",
        *_expert_lines(sizes),
        "",
        "residency:",
        *_comment(
            f"Adapters in host memory, per worker that holds adapters: {share}. An adapter of rank {_TYPICAL_RANK} on "
            f"all projections is {gib(typical)}: room for about {host_bytes // typical}.",
            "  ",
        ),
        f"  host_bytes: {host_bytes}",
        "",
        "router:",
        "  port: 8000",
        "  management: false  # true serves /v1/adapters to everyone who reaches the router",
        "",
        "adapters: {}  # NAME: {path: DIRECTORY}; or import them with `prelude adapters import`",
        "",
    ]
    return "\n".join(lines)


def _tokens(sizes: ModelSizes, host: Host, pools: Pools, slots: int) -> tuple[int, str] | None:
    """KV tokens of an engine with such slots, and the arithmetic; None on GPUs of unknown memory."""
    tp = pools.tensor_parallel
    if host.num_gpus == 0:
        usable = int(host.free_bytes * CPU_SHARE / pools.num_workers)
        memory = engine_memory(sizes, usable, 1, slots)
        if not memory.is_enough:
            raise ConfigError(
                f"the model does not fit: {memory.arithmetic} per engine, and {MIN_TOKENS} are the least. Usable is "
                f"{CPU_SHARE:.0%} of the free {gib(host.free_bytes)} for {pools.num_workers} engines; free memory, or "
                "start fewer workers"
            )
        capped = min(memory.max_tokens, _MAX_CPU_TOKENS)
        return capped, f"{memory.arithmetic}{f'; {capped} are enough for a CPU' if capped < memory.max_tokens else ''}"
    if host.gpu_bytes is None:
        return None
    usable = int(host.gpu_bytes * GPU_SHARE)
    memory = engine_memory(sizes, usable, tp, slots)
    if not memory.is_enough:
        sizes_that_fit = [
            size
            for size in _SIZES
            if can_divide(sizes.base, size) and engine_memory(sizes, usable, size, slots).is_enough
        ]  # fmt: skip
        remedy = (
            f"--tensor-parallel {sizes_that_fit[0]} would fit: "
            f"{engine_memory(sizes, usable, sizes_that_fit[0], slots).arithmetic}"
            if sizes_that_fit
            else "no tensor parallel size that divides its heads would fit; use GPUs with more memory"
        )
        raise ConfigError(
            f"the model does not fit a GPU of {gib(host.gpu_bytes)} at tensor parallel size {tp}: {memory.arithmetic}, "
            f"and {MIN_TOKENS} are the least. {remedy}"
        )
    return memory.max_tokens, f"{memory.arithmetic}. Usable is {GPU_SHARE:.0%} of a GPU's {gib(host.gpu_bytes)}"


def _expert_lines(sizes: ModelSizes) -> list[str]:
    if sizes.base.experts is None:
        return []
    more = expert_bytes(sizes.base, _TYPICAL_RANK, sizes.dtype)
    text = f"LoRA on experts is refused at 0. A rank of {_TYPICAL_RANK} adds {gib(more)} to each slot."
    return [*_comment(text, "  "), "  max_expert_rank: 0"]


def _tokens_lines(tokens: tuple[int, str] | None, indent: str) -> list[str]:
    if tokens is None:
        return [f"{indent}# max_total_tokens: NUMBER  # left out: SGLang takes the memory that is free on the GPU"]
    return [*_comment(f"{tokens[1]}.", indent), f"{indent}max_total_tokens: {tokens[0]}"]


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _workers(pools: Pools, device: str, decode_tokens: tuple[int, str] | None) -> list[str]:
    lines: list[str] = []
    for role, count in (("prefill", pools.prefill), ("decode", pools.decode), ("unified", pools.unified)):
        if not count:
            continue
        name = role if count > 1 else f"{role}-0"
        lines.append(f"  {name}:{f'  # {name}-0 to {name}-{count - 1}' if count > 1 else ''}")
        lines.append(f"    role: {role}")
        if count > 1:
            lines.append(f"    replicas: {count}")
        if device == "cuda":
            each = " for each replica" if count > 1 else ""
            lines.append(
                f"    gpus: {pools.tensor_parallel}  # the next free ones{each}; a list such as [0] names them"
            )
        if role == "decode" and device == "cuda" and decode_tokens is not None:
            lines += [
                "    engine:",
                "      # Without adapter slots more KV fits:",
                *_tokens_lines(decode_tokens, "      "),
            ]
    return lines


def _where(host: Host) -> str:
    if not host.num_gpus:
        return "a host without GPUs"
    memory = f" of {gib(host.gpu_bytes)}" if host.gpu_bytes else ""
    return f"{host.num_gpus} GPU{'s' if host.num_gpus > 1 else ''}{memory}"


def name_of(model: Path) -> str:
    """A name for requests, from the model's directory."""
    model = model.resolve()
    in_hub_cache = re.search(r"/models--[^/]*--([^/]+)/snapshots/[^/]+$", str(model))
    name = in_hub_cache[1] if in_hub_cache else model.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:63]
    return name or "model"


def _scalar(text: str) -> str:
    """As a YAML scalar on one line, quoted where it must be."""
    return yaml.safe_dump(text, width=10**6, allow_unicode=True).removesuffix("\n").removesuffix("\n...").strip()
