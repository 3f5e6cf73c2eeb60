"""`prelude train eval`: evaluate adapters on held-out rows, offline or through a running cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.train.options import KEY_VARIABLE
from cli.train.outcome import FAILED, failures_end

if TYPE_CHECKING:
    from training.runs.evaluation import Evaluation
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
        "answers generated greedily without, as workers do. In float32, one prompt at a time. With --url a running "
        "cluster answers, and exact matches are counted."
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
    command.add_argument("--rows", type=int, metavar="N", help="use the first N rows; default: all")
    command.add_argument(
        "--max-tokens", type=int, default=2048, metavar="N", help="limit of a prompt with its answer; default: 2048"
    )
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
        if arguments.url is None:
            _evaluate_offline(arguments)
        else:
            _evaluate_served(arguments)


def _evaluate_offline(arguments: argparse.Namespace) -> None:
    from training.errors import OptionInvalid

    if arguments.compare is not None:
        raise OptionInvalid("--compare compares a cluster with offline evaluation; name the cluster with --url")
    found = _offline(arguments, arguments.adapter)
    if arguments.json:
        print(json.dumps([_as_json(each) for each in found], indent=2))
    else:
        print("\n".join(_lines(found)))


def _offline(arguments: argparse.Namespace, directories: Sequence[Path | str]) -> list[Evaluation]:
    """The base model and each adapter."""
    from training.data.examples import load_sft
    from training.data.tokens import Encoder
    from training.runs.base import load_base
    from training.runs.evaluation import evaluate_base, evaluate_directory

    base = load_base(arguments.model, "float32", "cpu")
    encoder = Encoder(base.tokenizer, base.ends)
    examples = load_sft(arguments.data, encoder, arguments.max_tokens, num_rows=arguments.rows).examples
    return [
        evaluate_base(base.model, base.tokenizer, examples),
        *(
            evaluate_directory(base.model, base.tokenizer, examples, Path(each), arguments.positions)
            for each in directories
        ),
    ]


def _evaluate_served(arguments: argparse.Namespace) -> None:
    from training.data.examples import load_sft
    from training.data.prompts import prompts_of
    from training.data.tokens import Encoder
    from training.errors import OptionInvalid
    from training.runs.base import load_tokenizer
    from training.runs.served_evaluation import Cluster

    if arguments.positions is not None:
        raise OptionInvalid("--positions is for offline evaluation; a cluster applies an adapter as its files say")
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
    offline = [] if arguments.compare is None else _offline(arguments, arguments.compare)
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


def _lines(found: Sequence[Evaluation]) -> Iterator[str]:
    width = max(len(each.name) for each in found)
    yield f"{len(found[0].turns)} prompts"
    yield f"{'':{width}}  positions  rank  parameters    loss  exact match"
    for each in found:
        yield (
            f"{each.name:{width}}  {each.positions or '-':9}  {each.max_rank or '-':>4}  {each.num_parameters:>10,}  "
            f"{each.loss:6.4f}  {each.exact_match:11.3f}"
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
