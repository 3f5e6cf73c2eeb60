"""`prelude train eval`: evaluate adapters on held-out rows, offline or through a running cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.train.options import KEY_VARIABLE
from cli.train.outcome import FAILED, failures_end

if TYPE_CHECKING:
    from adapters.model.normal_form import Positions
    from training.runs.evaluation import AnsweredTurn, Evaluation
    from training.runs.served_evaluation import ServedEvaluation

_SHOWN = 10  # prompts that failed, or that were answered differently
_EPILOG = (
    f"{KEY_VARIABLE} has the API key for --url, if the cluster asks for one. Through a cluster there is no loss: it "
    "would read the expected answer as prompt, adapted. Exit status: 0, 1 if it failed or some prompt had no answer, 2 "
    "on wrong usage."
)


def add_command(commands: Any) -> None:
    """Add `eval`."""
    text = (
        "Loss and exact matches of adapters, and of the base model, on held-out rows: prompts read with the adapter, "
        "answers generated greedily without, as workers do, in float32. With --url a running cluster answers, and "
        "exact matches are counted."
    )
    command = commands.add_parser(
        "eval",
        help="Evaluate adapters on held-out rows, offline or through a cluster.",
        description=text,
        epilog=_EPILOG,
    )
    command.set_defaults(run=_evaluate)
    command.add_argument("--model", type=Path, required=True, metavar="DIR", help="the base model")
    command.add_argument(
        "--data", type=Path, required=True, nargs="+", metavar="FILE", help="JSONL: prompt and completion, or messages"
    )
    command.add_argument(
        "--adapter",
        default=[],
        nargs="+",
        metavar="DIR|NAME",
        help="directories, in a format of docs/adapter-formats.md; with --url the names of served adapters",
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
    cluster = command.add_argument_group("through a cluster")
    cluster.add_argument("--url", help="the router, such as http://127.0.0.1:8000")
    cluster.add_argument(
        "--compare",
        type=Path,
        nargs="*",
        metavar="DIR",
        help="also evaluate offline the base model and these directories, one for each --adapter, and list the prompts "
        "that are answered differently",
    )
    cluster.add_argument("--concurrency", type=int, default=8, metavar="N", help="concurrent prompts; default: 8")
    cluster.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S", help="timeout of one prompt; default: 120"
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    with failures_end():
        from training.errors import OptionInvalid

        if arguments.rows is not None and arguments.rows < 1:
            raise OptionInvalid(f"--rows is {arguments.rows}; it must be at least 1")
        if arguments.positions is not None and arguments.compare_positions:
            raise OptionInvalid("--compare-positions evaluates at both position sets; leave --positions out")
        if arguments.url is None:
            _evaluate_offline(arguments)
        else:
            _evaluate_served(arguments)


def _evaluate_offline(arguments: argparse.Namespace) -> None:
    from training.errors import OptionInvalid

    if arguments.compare is not None:
        raise OptionInvalid("--compare compares a cluster with offline evaluation; name the cluster with --url")
    found: list[Evaluation] = []
    for each in _offline(arguments, arguments.adapter, arguments.compare_positions):
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


def _offline(
    arguments: argparse.Namespace, directories: Sequence[Path | str], at_both: Sequence[Path] = ()
) -> Iterator[Evaluation]:
    """The base model and each adapter, as soon as it is evaluated. Raises OptionInvalid before the first one."""
    from training.data.examples import load_sft
    from training.data.tokens import Encoder
    from training.logs.progress import Count
    from training.runs.base import default_device, load_base
    from training.runs.evaluation import NO_ADAPTER, evaluate_adapter, read_for

    base = load_base(arguments.model, "float32", arguments.device or default_device())
    encoder = Encoder(base.tokenizer, base.ends)
    adapters = [(str(each), read_for(base.model, Path(each), arguments.positions)) for each in directories]
    adapters += [(str(each), read_for(base.model, each, where)) for each in at_both for where in ("all", "prefill")]
    examples = load_sft(arguments.data, encoder, arguments.max_tokens, num_rows=arguments.rows).examples
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


def _evaluate_served(arguments: argparse.Namespace) -> None:
    from training.data.examples import load_sft
    from training.data.prompts import prompts_of
    from training.data.tokens import Encoder
    from training.errors import OptionInvalid
    from training.runs.base import load_tokenizer
    from training.runs.served_evaluation import Cluster

    for flag in ("positions", "compare_positions", "answers"):
        if getattr(arguments, flag):
            raise OptionInvalid(
                f"--{flag.replace('_', '-')} is for offline evaluation; a cluster applies an adapter as its files say"
            )
    if arguments.compare is not None and len(arguments.compare) != len(arguments.adapter):
        raise OptionInvalid(
            f"--compare has {len(arguments.compare)} directories for {len(arguments.adapter)} names of --adapter; give "
            "one for each, in their order"
        )
    cluster = Cluster(arguments.url, os.environ.get(KEY_VARIABLE), arguments.concurrency, arguments.timeout_s)
    tokenizer, ends = load_tokenizer(arguments.model)
    loaded = load_sft(arguments.data, Encoder(tokenizer, ends), arguments.max_tokens, num_rows=arguments.rows)
    prompts = list(prompts_of(arguments.data, loaded))
    found = cluster.evaluate(tokenizer, ends, prompts, [None, *arguments.adapter])
    offline = [] if arguments.compare is None else list(_offline(arguments, arguments.compare))
    if arguments.json:
        print(json.dumps(_served_json(arguments.url, found, offline), indent=2))
    else:
        print("\n".join(_served_lines(arguments.url, found, offline)))
    if num_failed := sum(len(each.failed) for each in found):
        print(f"prelude: {num_failed} of {len(found) * len(prompts)} prompts had no answer", file=sys.stderr)
        sys.exit(FAILED)


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


def _served_json(url: str, found: Sequence[ServedEvaluation], offline: Sequence[Evaluation]) -> list[dict[str, Any]]:
    from training.runs.served_evaluation import differing

    documents = []
    for number, each in enumerate(found):
        document: dict[str, Any] = {
            "adapter": each.name,
            "url": url,
            "revisions": each.revisions,
            "exact_match": each.exact_match,
            "num_failed": len(each.failed),
            "answers": [asdict(turn) for turn in each.turns],
        }
        if offline:
            pairs = differing(each.turns, offline[number].turns)
            document["offline"] = _as_json(offline[number])
            document["differing"] = [
                {"where": one.where, "served": one.given, "offline": other.given} for one, other in pairs
            ]
        documents.append(document)
    return documents


def _served_lines(url: str, found: Sequence[ServedEvaluation], offline: Sequence[Evaluation]) -> Iterator[str]:
    from training.runs.served_evaluation import differing

    width = max(len(each.name) for each in found)
    yield f"{len(found[0].turns)} prompts through {url}"
    yield f"{'':{width}}  exact match  no answer{'  offline  different' if offline else ''}"
    details: list[str] = []
    for number, each in enumerate(found):
        line = f"{each.name:{width}}  {each.exact_match:11.3f}  {len(each.failed):9}"
        details += _first(f"{each.name}: no answer", [f"{turn.where}: {turn.error}" for turn in each.failed])
        if offline:
            pairs = list(differing(each.turns, offline[number].turns))
            line += f"  {offline[number].exact_match:7.3f}  {len(pairs):9}"
            told = [f"{one.where}: {one.given!r}, offline {other.given!r}" for one, other in pairs]
            details += _first(f"{each.name}: different from offline evaluation of {offline[number].name}", told)
        if len(each.revisions) > 1:
            details.append(f"{each.name}: several revisions answered: {', '.join(each.revisions)}")
        yield line
    yield from details


def _first(title: str, lines: Sequence[str]) -> list[str]:
    more = [f"  and {len(lines) - _SHOWN} more; --json has all"] if len(lines) > _SHOWN else []
    return [title, *(f"  {line}" for line in lines[:_SHOWN]), *more] if lines else []
