"""One run from its options to its outcome."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from adapters.model.base_weights import weights_digest
from training.adapted_model import AdaptedModel, sliding_window
from training.data.columns import preference_row, sft_row
from training.data.examples import Example, Examples, load
from training.data.tokens import Encoder
from training.errors import OptionInvalid
from training.loop.batches import Batches
from training.loop.log import JsonlLog, Log
from training.loop.options import LoopOptions
from training.loop.run_folder import DATE, RunFolder, begun_at
from training.loop.training import Evaluated, Outcome, Training
from training.losses import Objective, Sft
from training.runs.base import Dtype, LoadedBase, load_base
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec

_MAX_TOKENS = 2048  # of a prompt with its answer, unless the model reads fewer
_MIN_TOKENS = 2


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What a run trains, on what, and where it is kept."""

    model: Path
    data: Sequence[Path]
    output: Path
    adapter: AdapterSpec
    objective: Objective
    loop: LoopOptions
    held_out: Sequence[Path] = ()  # for evaluations
    max_tokens: int | None = None  # of a prompt with its answer; None: 2048, or what the model reads
    leave_out_long: bool = False
    dtype: Dtype = "float32"  # in which the adapter will be served
    device: str = "cpu"
    checkpointing: bool = False  # of activations
    resume: bool = False

    def __post_init__(self) -> None:
        """Raises OptionInvalid."""
        if self.max_tokens is not None and self.max_tokens < _MIN_TOKENS:
            raise OptionInvalid(
                f"max tokens is {self.max_tokens}; a prompt and its answer have at least {_MIN_TOKENS} tokens"
            )
        self.adapter.check_decay(self.loop.adam.weight_decay)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run whose data is read and whose model is loaded."""

    training: Training
    model: AdaptedModel
    folder: RunFolder
    base: LoadedBase
    num_examples: int
    num_too_long: int  # that were left out


@contextlib.contextmanager
def prepared(
    options: RunOptions,
    *,
    logs: Callable[[int], Sequence[Log]] = lambda num_steps: (),
    evaluated: Evaluated | None = None,
) -> Iterator[Prepared]:
    """Everything up to the first step; the folder is the caller's inside. Raises TrainingError.

    `logs` gets the number of steps, and returns logs beside those in the folder.
    """
    base = load_base(options.model, options.dtype, options.device)
    earlier = begun_at(options.output) if options.resume else None
    encoder = Encoder(base.tokenizer, base.ends, earlier or _now())
    max_tokens = _max_tokens(options, base)
    examples = _load(options.data, options, encoder, max_tokens)
    held_out = _load(options.held_out, options, encoder, max_tokens) if options.held_out else None
    adapter = TrainableAdapter.create(options.adapter, base.sizes, seed=options.loop.seed)
    batches = _batches(examples, options)
    held_out_batches = None if held_out is None else _batches(held_out, options)
    opened: list[Log] = []
    with contextlib.ExitStack() as owned:
        identity = _identity(options, base, examples, held_out)
        if encoder.is_dated:
            identity |= {DATE: str(encoder.date)}
        folder = RunFolder(options.output, identity, resume=options.resume)
        owned.callback(folder.close)
        owned.callback(_close, opened)
        model = AdaptedModel(base.model, adapter, checkpointing=options.checkpointing)
        opened.append(JsonlLog(folder.log_path))
        training = Training(
            model,
            str(options.model),
            options.objective,
            batches,
            options.loop,
            folder,
            held_out=held_out_batches,
            logs=opened,
            evaluated=evaluated,
        )
        opened.extend(logs(training.num_steps))
        yield Prepared(training, model, folder, base, len(examples), examples.num_too_long)


def run(options: RunOptions) -> Outcome:
    """Train to the end. Raises TrainingError."""
    with prepared(options) as ready:
        return ready.training.run()


def _now() -> datetime:
    return datetime.now().replace(microsecond=0)


def _close(logs: Sequence[Log]) -> None:
    with contextlib.ExitStack() as all_of_them:
        for log in logs:
            all_of_them.callback(log.close)


def _max_tokens(options: RunOptions, base: LoadedBase) -> int:
    """Of a prompt with its answer. Raises OptionInvalid for more than the model reads, or attends to."""
    limits = {"reads": base.sizes.context_length, "attends to, with its sliding window,": sliding_window(base.model)}
    known = {how: limit for how, limit in limits.items() if limit}
    if options.max_tokens is None:
        return min(_MAX_TOKENS, *known.values()) if known else _MAX_TOKENS
    for how, limit in known.items():
        if options.max_tokens > limit:
            raise OptionInvalid(f"examples of {options.max_tokens} tokens; the model {how} {limit}")
    return options.max_tokens


def _load(files: Sequence[Path], options: RunOptions, encoder: Encoder, max_tokens: int) -> Examples:
    read = sft_row if isinstance(options.objective, Sft) else preference_row
    return load(files, encoder, read, max_tokens, leave_out_long=options.leave_out_long)


def _batches(examples: Examples, options: RunOptions) -> Batches:
    loop = options.loop
    return Batches(examples.examples, loop.row_tokens, fixed_rows=loop.fixed_rows)


def _identity(options: RunOptions, base: LoadedBase, examples: Examples, held_out: Examples | None) -> dict[str, Any]:
    """What may not change while a run goes on. How often something is logged may."""
    loop = {
        name: value
        for name, value in asdict(options.loop).items()
        if name not in ("log_every", "eval_every", "save_every")
    }
    return {
        "format": "prelude-training-1",
        "base_model": {"sizes": base.sizes.fingerprint, "weights": weights_digest(options.model)},
        "data": _digest(examples.examples),
        "held_out_data": None if held_out is None else _digest(held_out.examples),
        "objective": {"name": type(options.objective).__name__.lower(), **_fields(options.objective)},
        "adapter": asdict(options.adapter),
        "dtype": options.dtype,
        "checkpointing": options.checkpointing,
        **loop,
    }


def _fields(objective: Any) -> dict[str, Any]:
    return {name: getattr(objective, name) for name in objective.__dataclass_fields__}


def _digest(examples: Sequence[Example]) -> str:
    """32 hex digits of the token ids, and so of files, tokenizer and chat template together."""
    digest = hashlib.sha256()
    for example in examples:
        for turn in example.turns:
            for ids in (turn.context, *turn.answers):
                digest.update(np.array([-1, len(ids), *ids], dtype="<i8").tobytes())
        digest.update(b"row")
    return digest.hexdigest()[:32]
