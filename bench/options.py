"""Options of the adapter-tax benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.model.serving import EngineDtype

DTYPE: EngineDtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size and number of requests."""

    prompt_tokens: int
    generated_tokens: int
    concurrency: int
    num_requests: int  # per measurement


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    systems: tuple[str, ...]
    adapters: tuple[int, ...]  # numbers of adapters in use; 0 is added for systems with a baseline
    repeats: int
    shape: Shape
    num_slots: int
    pd_through: str  # "engines" or "router"
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"  # or "cuda"
    lora_rank: int = 16
    reft_rank: int = 8
    tensor_parallel: int = 1  # ranks of each engine, one GPU each
    engine_arguments: tuple[str, ...] = ()  # for every engine
    all_shares: tuple[float, ...] = ()  # of unified_lora's requests, whose adapters act at all positions; (): none do
