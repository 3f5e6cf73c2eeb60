"""What the adapter-tax benchmark is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.model.serving import EngineDtype

DTYPE: EngineDtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of every request, and how many."""

    prompt_tokens: int
    generated_tokens: int
    concurrency: int
    num_requests: int  # of one measurement


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    systems: tuple[str, ...]
    adapters: tuple[int, ...]  # numbers of adapters in use; 0 is added where there is a baseline
    repeats: int
    shape: Shape
    num_slots: int
    pd_through: str  # "engines" or "router"
    model: str = "tiny"  # of bench.models.MODELS
    device: str = "cpu"  # or "cuda"
    lora_rank: int = 16
    reft_rank: int = 8
    engine_arguments: tuple[str, ...] = ()  # for every engine alike
