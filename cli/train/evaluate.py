"""`prelude train eval`: evaluate adapters on held-out rows, without a cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.train.outcome import failures_end

if TYPE_CHECKING:
    from training.runs.evaluation import Evaluation


def add_command(commands: Any) -> None:
    """Add `eval`."""
    text = (
        "Loss and exact matches of adapters, and of the base model, on held-out rows: prompts read with the adapter, "
        "answers generated greedily without, as workers do. In float32, one prompt at a time."
    )
    command = commands.add_parser(
        "eval", help="Evaluate adapters on held-out rows, without a cluster.", description=text
    )
    command.set_defaults(run=_evaluate)
    command.add_argument("--model", type=Path, required=True, metavar="DIR", help="the base model")
    command.add_argument(
        "--data", type=Path, required=True, nargs="+", metavar="FILE", help="JSONL: prompt and completion, or messages"
    )
    command.add_argument(
        "--adapter", type=Path, default=[], nargs="+", metavar="DIR", help="in a format of docs/adapter-formats.md"
    )
    command.add_argument("--positions", choices=("prefill", "all"), help="in place of the adapters' own")
    command.add_argument("--rows", type=int, metavar="N", help="the first N rows; default: all")
    command.add_argument("--max-tokens", type=int, default=2048, metavar="N", help="of a prompt with its answer")
    command.add_argument("--json", action="store_true", help="print JSON, with every answer")


def _evaluate(arguments: argparse.Namespace) -> None:
    with failures_end():
        from training.data.examples import load_sft
        from training.data.tokens import Encoder
        from training.runs.base import load_base
        from training.runs.evaluation import evaluate_base, evaluate_directory

        base = load_base(arguments.model, "float32", "cpu")
        examples = load_sft(
            arguments.data, Encoder(base.tokenizer, base.ends), arguments.max_tokens, num_rows=arguments.rows
        ).examples
        found = [evaluate_base(base.model, base.tokenizer, examples)]
        for directory in arguments.adapter:
            found.append(evaluate_directory(base.model, base.tokenizer, examples, directory, arguments.positions))
        if arguments.json:
            print(json.dumps([_as_json(each) for each in found], indent=2))
        else:
            print("\n".join(_lines(found)))


def _as_json(found: Evaluation) -> dict[str, Any]:
    return {
        "adapter": found.name,
        "positions": found.positions,
        "max_rank": found.max_rank,
        "num_parameters": found.num_parameters,
        "eval_loss": found.loss,
        "exact_match": found.exact_match,
        "answers": [asdict(turn) for turn in found.turns],
    }


def _lines(found: Sequence[Evaluation]) -> Iterator[str]:
    width = max(len(each.name) for each in found)
    yield f"{len(found[0].turns)} prompts"
    yield f"{'':{width}}  positions  rank  parameters    loss  exact match"
    for each in found:
        yield (
            f"{each.name:{width}}  {each.positions or '-':9}  {each.max_rank or '-':>4}  {each.num_parameters:>10,}  "
            f"{each.loss:6.4f}  {each.exact_match:11.3f}"
        )
