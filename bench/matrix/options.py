"""Options of `prelude bench matrix`."""

from dataclasses import dataclass

from bench.errors import OptionInvalid
from bench.systems.layout import Layout
from bench.systems.models import require_loadable
from bench.workloads.workload import Workload

# In the order in which they are started and measured.
SYSTEMS = {
    "none": "stock SGLang without adapters: the same requests, their adapters left out",
    "stock": "stock SGLang's multi-LoRA",
    "stock_pd": "stock SGLang's prefill/decode with LoRA on both sides",
    "unified": "Prelude, unified workers: LoRA while the prompt is read",
    "unified_direft": "Prelude, unified workers: DiReFT while the prompt is read",
    "pair": "Prelude, prefill/decode: LoRA on the prefill side only",
}
OURS = ("unified", "unified_direft", "pair")
PAIRS = ("stock_pd", "pair")
SLO_MS = {"cpu": {"ttft": 2000.0, "tpot": 200.0}, "cuda": {"ttft": 500.0, "tpot": 50.0}}
SEED = 1
REFT_RANK = 8
_MAX_CHECKED = 128  # adapters
DURATION_S = {"cpu": 4.0, "cuda": 60.0}


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    cells: tuple[Workload, ...]
    systems: tuple[str, ...]  # keys of SYSTEMS
    slo_ms: dict[str, float]
    duration_s: float  # of each load, at least
    repeats: int = 2
    to: str = "stock"  # the system that ratios are to; if it is not measured, the first one
    num_slots: int = 32
    lora_rank: int = 16
    model: str = "tiny"  # a key of bench.systems.models.MODELS
    device: str = "cpu"  # or "cuda"
    num_gpus: int = 1  # of each system
    tensor_parallel: int = 1  # GPUs of each engine
    through: str = "engines"  # or "router": our systems as a whole cluster, with one
    host_adapters: int | None = None  # that fit in a worker's host memory, through a router; None: all
    layout: Layout | None = None  # of the system, which then is alone on its GPUs; None: as many as `num_gpus` hold
    chunk_tokens: int | None = None  # of prompts per prefill batch; None: 8,192 on GPUs, 2,048 on CPUs
    engine_arguments: tuple[str, ...] = ()  # for every engine

    def check(self) -> None:
        """Raises OptionInvalid."""
        pairs = [name for name in self.systems if name in PAIRS]
        if pairs and self.layout is None and self.num_gpus > 1 and self.num_gpus % (2 * self.tensor_parallel):
            raise OptionInvalid(
                f"--gpus {self.num_gpus}: {' and '.join(pairs)} have two engines each; give an even number"
                f"{' of groups of ' + str(self.tensor_parallel) if self.tensor_parallel > 1 else ''}"
            )
        if self.num_gpus % self.tensor_parallel:
            raise OptionInvalid(
                f"--tensor-parallel {self.tensor_parallel}: --gpus {self.num_gpus} is no multiple of it"
            )
        require_loadable(self.systems, self.engine_arguments)
        if self.device == "cpu" and self.num_gpus > 1:
            raise OptionInvalid(f"--gpus {self.num_gpus}: --device cpu has none")
        if self.host_adapters is not None and self.through != "router":
            raise OptionInvalid(
                f"--host-adapters {self.host_adapters}: engines alone keep all; it is for --through router"
            )
        if self.has_all_positions and (unable := set(self.systems) - {"none", "stock", "stock_pd", "unified"}):
            raise OptionInvalid(
                f"--all-shares: {', '.join(sorted(unable))} are measured with adapters for the prompt only; "
                "name others with --systems"
            )

    def layout_of(self, system: str) -> Layout:
        """On one GPU or a CPU, both engines of a pair share it."""
        if self.layout is not None:
            return self.layout
        if system in PAIRS:
            pairs = max(1, self.num_gpus // (2 * self.tensor_parallel))
            return Layout(prefill=pairs, decode=pairs)
        return Layout(unified=max(1, self.num_gpus // self.tensor_parallel))

    @property
    def has_all_positions(self) -> bool:
        return any(cell.all_share for cell in self.cells)

    @property
    def max_adapters(self) -> int:
        return max(cell.num_adapters for cell in self.cells)

    @property
    def num_checked(self) -> int:
        """The first adapters, each of which must give its own answer. Others are cold where a cluster loads them."""
        return min(self.max_adapters, _MAX_CHECKED)
