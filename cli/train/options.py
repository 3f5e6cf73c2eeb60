"""The flags of `prelude train sft | dpo`, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.losses import Objective
    from training.runs.run import RunOptions

KEY_VARIABLE = "PRELUDE_API_KEY"
_ALPHA = 32.0
_KINDS = ("lora", "direft", "loreft")
_DTYPES = ("float32", "bfloat16", "float16")
# Where to start looking; ReFT changes less per step than LoRA.
_LEARNING_RATES = {
    ("sft", "lora"): 2e-4, ("sft", "direft"): 1e-3, ("sft", "loreft"): 1e-3,
    ("dpo", "lora"): 2e-5, ("dpo", "direft"): 1e-4, ("dpo", "loreft"): 1e-4,
}  # fmt: skip


class _OfOneAdapter(argparse.Action):
    """A flag that may be given once: argparse would keep the last value and say nothing."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option} is given twice; a run trains one adapter, so start a run for each")
        setattr(namespace, self.dest, values)


def add_options(command: argparse.ArgumentParser, *, is_preference: bool) -> None:
    """Add all flags of a run."""
    columns = "prompt, chosen and rejected" if is_preference else "prompt and completion, or messages"
    files = command.add_argument_group("what is trained on what")
    files.add_argument(
        "--model", required=True, help="the base model: a directory, a GGUF file, or OWNER/REPOSITORY of the Hub"
    )
    files.add_argument(
        "--data", type=Path, required=True, nargs="+", metavar="FILE", help=f"JSONL with trl's columns: {columns}"
    )
    files.add_argument("--eval-data", type=Path, default=[], nargs="+", metavar="FILE", help="held-out rows")
    files.add_argument(
        "--output", type=Path, required=True, action=_OfOneAdapter, metavar="DIR", help="the run's folder"
    )
    files.add_argument("--resume", action="store_true", help="continue the run in --output, or start a new one")

    adapter = command.add_argument_group("the adapter")
    adapter.add_argument("--kind", choices=_KINDS, default="lora", help="default: lora")
    adapter.add_argument("--rank", type=int, default=16, help="default: 16")
    adapter.add_argument("--alpha", type=float, help="LoRA's scale is alpha / rank; default: 32")
    adapter.add_argument(
        "--positions",
        choices=("prefill", "all"),
        default="prefill",
        help="adapt the prompt only, or also the answers; default: prefill",
    )
    adapter.add_argument("--modules", nargs="+", metavar="NAME", help="projections that LoRA changes; default: all")
    adapter.add_argument("--layers", nargs="+", type=int, metavar="N", help="default: all")

    if is_preference:
        loss = command.add_argument_group("the loss")
        loss.add_argument("--beta", type=float, default=0.1, help="default: 0.1")
        loss.add_argument("--label-smoothing", type=float, default=0.0, help="default: 0")

    steps = command.add_argument_group("steps")
    steps.add_argument("--learning-rate", type=float, help="default: by kind and loss, 2e-4 for SFT with LoRA")
    steps.add_argument("--epochs", type=float, help="default: as many as 100 steps take, from 1 to 20")
    steps.add_argument("--max-steps", type=int, metavar="N", help="instead of --epochs")
    steps.add_argument("--batch-size", type=int, default=16, metavar="N", help="examples per step; default: 16")
    steps.add_argument("--warmup-ratio", type=float, default=0.03, help="share of all steps; default: 0.03")
    steps.add_argument("--decay", choices=("linear", "cosine", "constant"), default="linear", help="default: linear")
    steps.add_argument("--weight-decay", type=float, default=0.0, help="default: 0")
    steps.add_argument(
        "--max-grad-norm", type=float, default=1.0, help="clip gradients to this norm, 0: no clipping; default: 1"
    )
    steps.add_argument("--seed", type=int, default=0, help="default: 0")

    memory = command.add_argument_group("lengths and memory")
    memory.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="limit of a prompt with its answer; default: 2048, at most the model's context length",
    )
    memory.add_argument("--leave-out-long", action="store_true", help="skip longer rows instead of refusing them")
    memory.add_argument(
        "--row-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="tokens per packed row, a multiple of 128; default: 4096",
    )
    memory.add_argument(
        "--gradient-checkpointing", action="store_true", help="recompute activations: slower, less memory"
    )
    memory.add_argument(
        "--dtype", choices=_DTYPES, help="the serving dtype; default: float32 on CPUs, bfloat16 on GPUs"
    )
    memory.add_argument("--device", help="default: cuda if there is one, else cpu")

    told = command.add_argument_group("logs, checkpoints and pushes")
    told.add_argument("--log-every", type=int, default=10, metavar="N", help="log every N steps; default: 10")
    told.add_argument("--eval-every", type=int, metavar="N", help="evaluate every N steps; default: ten times a run")
    told.add_argument("--save-every", type=int, metavar="N", help="save every N steps; default: ten times a run")
    told.add_argument(
        "--push",
        action=_OfOneAdapter,
        metavar="NAME",
        help="push the checkpoint as a revision of this adapter: after each evaluation, without --eval-data at the end",
    )
    told.add_argument("--push-alias", metavar="ALIAS", help="the alias that a push moves; default: latest")
    told.add_argument(
        "--router",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help=f"the router for --push; {KEY_VARIABLE} has the API key, if it needs one. Default: %(default)s",
    )


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """What the flags ask for. Raises TrainingError."""
    from cluster.local.named_model import model_of_option
    from training.loop.optimiser import AdamOptions
    from training.loop.options import LoopOptions
    from training.runs.base import Dtype, default_device
    from training.runs.run import RunOptions
    from training.trainable.spec import AdapterSpec

    _refuse_unused(arguments)
    device = arguments.device or default_device()
    dtype: Dtype = arguments.dtype or ("float32" if device == "cpu" else "bfloat16")
    objective = _objective(arguments)
    learning_rate = arguments.learning_rate
    if learning_rate is None:
        learning_rate = _LEARNING_RATES[arguments.objective, arguments.kind]
    return RunOptions(
        model=model_of_option(arguments.model),
        data=arguments.data,
        output=arguments.output,
        adapter=AdapterSpec(
            kind=arguments.kind,
            rank=arguments.rank,
            alpha=_ALPHA if arguments.alpha is None else arguments.alpha,
            positions=arguments.positions,
            modules=None if arguments.modules is None else tuple(arguments.modules),
            layers=None if arguments.layers is None else tuple(arguments.layers),
        ),
        objective=objective,
        loop=LoopOptions(
            learning_rate=learning_rate,
            num_epochs=arguments.epochs,
            max_steps=arguments.max_steps,
            batch_size=arguments.batch_size,
            row_tokens=arguments.row_tokens,
            fixed_rows=dtype != "float32",
            warmup_ratio=arguments.warmup_ratio,
            decay=arguments.decay,
            adam=AdamOptions(weight_decay=arguments.weight_decay, max_grad_norm=arguments.max_grad_norm),
            seed=arguments.seed,
            log_every=arguments.log_every,
            eval_every=arguments.eval_every,
            save_every=arguments.save_every,
        ),
        held_out=arguments.eval_data,
        max_tokens=arguments.max_tokens,
        leave_out_long=arguments.leave_out_long,
        dtype=dtype,
        device=device,
        checkpointing=arguments.gradient_checkpointing,
        resume=arguments.resume,
    )


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Raises OptionInvalid for a flag that another one, or its absence, leaves without effect."""
    from training.errors import OptionInvalid

    unused = (
        ("--alpha", arguments.alpha is not None and arguments.kind != "lora", f"of lora; {arguments.kind} has 1/√rank"),
        ("--eval-every", arguments.eval_every is not None and not arguments.eval_data, "for --eval-data"),
        ("--push-alias", arguments.push_alias is not None and arguments.push is None, "for --push"),
    )
    for flag, is_unused, what_for in unused:
        if is_unused:
            raise OptionInvalid(f"{flag} is {what_for}; leave it out")


def _objective(arguments: argparse.Namespace) -> Objective:
    from training.losses import Dpo, Sft

    return Sft() if arguments.objective == "sft" else Dpo(arguments.beta, arguments.label_smoothing)
