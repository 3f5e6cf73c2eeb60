"""`prelude train eval`: evaluate adapters on held-out rows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.libraries import needing

if TYPE_CHECKING:
    from adapters.model.normal_form import Positions
    from training.runs.evaluation import AnsweredTurn, Evaluation


def add_command(commands: Any) -> None:
    """Add `eval`."""
    text = (
        "Loss and exact matches of adapters, and of the base model, on held-out rows: prompts read with the adapter, "
        "answers generated greedily without, as workers do, in float32."
    )
    command = commands.add_parser(
        "eval",
        help="Evaluate adapters on held-out rows.",
        description=text,
        epilog="Exit status: 0, 1 if it failed, 2 on wrong usage.",
    )
    command.set_defaults(run=_evaluate)
    command.add_argument("--model", required=True, help="the base model, as for `prelude init`")
    command.add_argument(
        "--data", type=Path, required=True, nargs="+", metavar="FILE", help="JSONL: prompt and completion, or messages"
    )
    command.add_argument(
        "--adapter",
        default=[],
        nargs="+",
        type=Path,
        metavar="DIR",
        help="directories, in a format of docs/adapter-formats.md",
    )
    command.add_argument("--positions", choices=("prefill", "all"), help="override the adapters' own positions")
    command.add_argument(
        "--compare-positions",
        type=Path,
        default=[],
        nargs="+",
        metavar="DIR",
        help="directories that are evaluated twice: applied at all positions, and to the prompt only",
    )
    command.add_argument("--rows", type=int, metavar="N", help="use the first N rows; default: all")
    command.add_argument(
        "--max-tokens", type=int, default=2048, metavar="N", help="limit of a prompt with its answer; default: 2048"
    )
    command.add_argument("--device", help="default: cuda if there is one, else cpu")
    command.add_argument("--answers", type=Path, metavar="FILE", help="write each answer to this JSONL as it comes")
    command.add_argument("--json", action="store_true", help="print JSON, with every answer")


def _evaluate(arguments: argparse.Namespace) -> None:
    with needing():
        from training.errors import OptionInvalid

        if arguments.rows is not None and arguments.rows < 1:
            raise OptionInvalid(f"--rows is {arguments.rows}; it must be at least 1")
        if arguments.positions is not None and arguments.compare_positions:
            raise OptionInvalid("--compare-positions evaluates at both position sets; leave --positions out")
        _print_all(arguments)


def _print_all(arguments: argparse.Namespace) -> None:
    found: list[Evaluation] = []
    for each in _evaluations(arguments):
        if not found and not arguments.json:
            names = [each.name, *map(str, arguments.adapter), *map(str, arguments.compare_positions)]
            width = max(map(len, names))
            print(f"{len(each.turns)} prompts")
            print(f"{'':{width}}  positions  rank  parameters    loss  exact match")
        found.append(each)
        if not arguments.json:
            print(_line(each, width), flush=True)
    if arguments.json:
        print(json.dumps([_as_json(each) for each in found], indent=2))


def _evaluations(arguments: argparse.Namespace) -> Iterator[Evaluation]:
    """The base model and each adapter, as soon as it is evaluated. Raises OptionInvalid before the first one."""
    from cluster.local.named_model import model_of_option
    from training.data.columns import sft_row
    from training.data.examples import load
    from training.data.tokens import Encoder
    from training.loop.progress import Count
    from training.runs.base import default_device, load_base
    from training.runs.evaluation import NO_ADAPTER, evaluate_adapter, read_for

    base = load_base(model_of_option(arguments.model), "float32", arguments.device or default_device())
    encoder = Encoder(base.tokenizer, base.ends)
    adapters = [(str(each), read_for(base.model, each, arguments.positions)) for each in arguments.adapter]
    adapters += [
        (str(each), read_for(base.model, each, where))
        for each in arguments.compare_positions
        for where in ("all", "prefill")
    ]
    examples = load(arguments.data, encoder, sft_row, arguments.max_tokens, num_rows=arguments.rows).examples
    num_prompts = sum(len(example.turns) for example in examples)
    with _written(arguments.answers) as write:
        for name, adapter in ((NO_ADAPTER, None), *adapters):
            positions = None if adapter is None else adapter.positions
            count = Count(name if positions is None else f"{name}, {positions}", num_prompts, "prompt")

            def answered(
                turn: AnsweredTurn, name: str = name, positions: Positions | None = positions, count: Count = count
            ) -> None:
                count.add()
                write({"adapter": name, "positions": positions, **asdict(turn)})

            found = evaluate_adapter(base.model, base.tokenizer, examples, adapter, name, answered)
            count.close()
            yield found


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Writes lines of JSON to the file, each as it comes; None: nowhere. Raises OptionInvalid."""
    from training.errors import OptionInvalid

    if path is None:
        yield lambda line: None
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield lambda line: print(json.dumps(line), file=file, flush=True)
    except OSError as error:
        raise OptionInvalid(f"--answers: {path} cannot be written ({error.strerror}); name another file") from error


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


def _line(found: Evaluation, width: int) -> str:
    return (
        f"{found.name:{width}}  {found.positions or '-':9}  {found.max_rank or '-':>4}  {found.num_parameters:>10,}  "
        f"{found.loss:6.4f}  {found.exact_match:11.3f}"
    )
