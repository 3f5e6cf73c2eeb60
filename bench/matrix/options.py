"""Options of `prelude bench matrix`."""

from __future__ import annotations

from dataclasses import dataclass

from bench.errors import BenchError
from bench.matrix.plan import Cell
from bench.systems.models import require_loadable

# In the order in which they are started and measured.
SYSTEMS = {
    "none": "stock SGLang without adapters: the same requests, their adapters left out",
    "stock": "stock SGLang's multi-LoRA",
    "stock_pd": "stock SGLang's prefill/decode with LoRA on both sides",
    "unified": "Prelude, unified workers: LoRA while the prompt is read",
    "pair": "Prelude, prefill/decode: LoRA on the prefill side only",
}
PAIRS = ("stock_pd", "pair")
THROUGH = ("engines", "router")
SLO_MS = {"cpu": {"ttft": 2000.0, "tpot": 200.0}, "cuda": {"ttft": 500.0, "tpot": 50.0}}
_MAX_CHECKED = 128  # adapters
DURATION_S = {"cpu": 4.0, "cuda": 60.0}


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    cells: tuple[Cell, ...]
    systems: tuple[str, ...]  # keys of SYSTEMS
    slo_ms: dict[str, float]
    duration_s: float  # of each load, at least
    repeats: int = 2
    num_slots: int = 32
    lora_rank: int = 16
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"  # or "cuda"
    num_gpus: int = 1  # of each system
    through: str = "engines"  # or "router": our systems as a whole cluster, with one
    is_alone: bool = False  # one system at a time, so that a GPU's memory is its own
    seed: int = 1
    engine_arguments: tuple[str, ...] = ()  # for every engine

    def check(self) -> None:
        """Raises BenchError."""
        pairs = [name for name in self.systems if name in PAIRS]
        if pairs and self.num_gpus > 1 and self.num_gpus % 2:
            raise BenchError(
                f"--gpus {self.num_gpus}: {' and '.join(pairs)} have two engines each; give an even number"
            )
        require_loadable(self.systems, self.engine_arguments)
        if self.device == "cpu" and self.num_gpus > 1:
            raise BenchError(f"--gpus {self.num_gpus}: --device cpu has none")

    @property
    def max_adapters(self) -> int:
        return max(cell.num_adapters for cell in self.cells)

    @property
    def num_checked(self) -> int:
        """The first adapters, each of which must give its own answer. Others are cold where a cluster loads them."""
        return min(self.max_adapters, _MAX_CHECKED)
