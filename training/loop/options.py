"""Options of the training loop, independent of the command line."""

from dataclasses import dataclass, field

from training.errors import OptionInvalid
from training.loop.optimiser import AdamOptions
from training.loop.schedule import DECAYS, Decay
from training.tree.rows import ROW_MULTIPLE

_MAX_SEED = 2**63 - 1  # of torch's generators


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """Steps, their size, and how often something is told or kept. Raises OptionInvalid."""

    learning_rate: float
    num_epochs: float | None = None  # None: as many as 100 steps take, from 1 to 20
    max_steps: int | None = None  # in place of num_epochs
    batch_size: int = 16  # examples a step; their rows are accumulated
    row_tokens: int = 4096  # read at once
    fixed_rows: bool = False  # pad every row to row_tokens: kernels in 16 bits round by the length
    warmup_ratio: float = 0.03  # of all steps
    decay: Decay = "linear"
    adam: AdamOptions = field(default_factory=AdamOptions)
    seed: int = 0
    log_every: int = 10  # steps
    eval_every: int | None = None  # steps; None: ten times a run
    save_every: int | None = None  # steps; None: ten times a run. Each evaluation saves, too

    def __post_init__(self) -> None:
        for name in ("max_steps", "batch_size", "log_every", "eval_every", "save_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionInvalid(f"{name.replace('_', ' ')} is {value}; it must be at least 1")
        if not 0 < self.learning_rate < 1e6:
            raise OptionInvalid(f"the learning rate is {self.learning_rate:g}; it must be positive and finite")
        if self.decay not in DECAYS:
            raise OptionInvalid(f"the decay is {self.decay!r}; there are {', '.join(DECAYS)}")
        if not 0 <= self.seed <= _MAX_SEED:
            raise OptionInvalid(f"the seed is {self.seed}; it is from 0 to {_MAX_SEED}")
        if self.num_epochs is not None and not 0 < self.num_epochs < 1e6:
            raise OptionInvalid(f"the number of epochs is {self.num_epochs}; it must be positive")
        if not 0 <= self.warmup_ratio < 1:
            raise OptionInvalid(
                f"the warm-up ratio is {self.warmup_ratio}; it is a part of all steps, from 0 to below 1"
            )
        if self.row_tokens < 1 or self.row_tokens % ROW_MULTIPLE:
            raise OptionInvalid(f"rows of {self.row_tokens} tokens; their length must be a multiple of {ROW_MULTIPLE}")
