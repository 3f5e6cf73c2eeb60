"""Random adapters in numbers, ready for an engine to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.formats import Limits, read_adapter
from adapters.manifest import revision_id_of
from adapters.random_adapters import write_random_lora, write_random_reft
from adapters.serving import EngineDtype, write_for_engine

LORA_RANK = 16
REFT_RANK = 8
_REFT_STD = 4.0  # each layer moves the residual stream by about a quarter, so that every answer is another one


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """One adapter as its owner has it and as an engine loads it."""

    name: str
    source: Path
    serving: Path
    revision_id: str


def prepare_adapters(kind: str, count: int, base: BaseModel, dtype: EngineDtype, folder: Path) -> list[PreparedAdapter]:
    """Write `count` different adapters: "lora", rank 16 on all seven projections; "direft", rank 8 on every layer."""
    prepared = []
    for number in range(count):
        name = f"{kind}-{number}"
        if kind == "lora":
            source = write_random_lora(folder / name, base, number, rank=LORA_RANK, alpha=2 * LORA_RANK, dtype=dtype)
        else:
            source = write_random_reft(
                folder / name, base, number, kind=kind, rank=REFT_RANK, dtype=dtype, std=_REFT_STD
            )
        adapter = read_adapter(source, base, Limits())
        serving = folder / f"{name}.serving"
        write_for_engine(adapter, base, dtype, serving)
        prepared.append(PreparedAdapter(name, source, serving, revision_id_of(adapter)))
    return prepared
