"""`prelude adapters convert`: teaches an adapter for all positions to live in the prompt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cli.adapters.opened import opened_library
from cli.adapters.outcome import REFUSED, fail, failures_end, print_result
from cli.libraries import needing

if TYPE_CHECKING:
    from training.conversion.convert import Converted
    from training.conversion.report import Report

_MIN_AGREEMENT = 0.8


def add_commands(commands: Any) -> None:
    """Add `convert`."""
    text = (
        "Teach an adapter that was trained for all positions to live in the prompt, so that pairs can serve it. It "
        "answers your prompts at all positions; a new adapter, applied to the prompt only, learns to answer as it "
        "does. Reports how far it does so on held-out prompts."
    )
    convert = commands.add_parser(
        "convert",
        help="Teach an adapter for all positions to live in the prompt.",
        description=text,
        epilog="--output gets the adapter and conversion.json, the report. Exit status: 0 on success, 1 if it failed "
        "or the new adapter agrees too rarely, 2 on wrong usage. Needs the extra `train`.",
    )
    convert.set_defaults(run=_convert)
    convert.add_argument("source", metavar="SOURCE", help="a directory, or with --config an adapter of the catalog")
    convert.add_argument("--model", help="the base model, as for `prelude init`; default: that of --config")
    convert.add_argument("--config", type=Path, metavar="FILE", help="a cluster.yaml")
    convert.add_argument(
        "--data",
        type=Path,
        required=True,
        nargs="+",
        metavar="FILE",
        help="JSONL, a few hundred prompts: prompt or messages. Answers in it are not learned, only compared",
    )
    convert.add_argument(
        "--eval-data", type=Path, nargs="+", metavar="FILE", help="held-out prompts; default: a fifth of --data"
    )
    convert.add_argument("--output", type=Path, required=True, metavar="DIR", help="created; must not exist")
    convert.add_argument("--rank", type=int, metavar="N", help="default: that of SOURCE")
    convert.add_argument("--steps", type=int, default=200, metavar="N", help="at most; default: 200")
    convert.add_argument("--learning-rate", type=float, default=1e-3, help="default: 0.001")
    convert.add_argument(
        "--answer-tokens", type=int, default=128, metavar="N", help="most tokens of an answer; default: 128"
    )
    convert.add_argument(
        "--min-agreement",
        type=float,
        default=_MIN_AGREEMENT,
        metavar="SHARE",
        help=f"of held-out answers that must be SOURCE's, token for token; default: {_MIN_AGREEMENT}",
    )
    convert.add_argument("--seed", type=int, default=0, help="default: 0")
    convert.add_argument("--device", help="default: cuda if there is one, else cpu")
    convert.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the serving dtype; default: float32 on CPUs, bfloat16 on GPUs",
    )
    convert.add_argument("--json", action="store_true", help="print the report as JSON")


def _convert(arguments: argparse.Namespace) -> None:
    with needing(), failures_end(arguments):
        _check(arguments)
        with _source(arguments) as (directory, model, revision_id):
            converted = _converted(arguments, directory, model, revision_id)
        report = converted.report
        is_kept = report.after.agreement >= arguments.min_agreement
        converted.write(arguments.output, str(model), with_adapter=is_kept)
    lines = list(_lines(report))
    if not is_kept:
        if not arguments.json:
            print("\n".join(lines))
        message = (
            f"{report.after.agreement:.3f} of the held-out answers are the teacher's, --min-agreement is "
            f"{arguments.min_agreement:g}: {arguments.output} has the report and no adapter. Try more prompts, --steps "
            "or --rank, or take it with a lower --min-agreement"
        )
        fail(arguments, REFUSED, "agreement_too_low", message, **asdict(report))
    print_result(arguments, asdict(report), [*lines, f"Next: prelude adapters import NAME {arguments.output}"])


def _check(arguments: argparse.Namespace) -> None:
    """Raises OptionInvalid before anything is loaded."""
    from training.errors import OptionInvalid

    if arguments.model is None and arguments.config is None:
        raise OptionInvalid("name the base model with --model, or a cluster.yaml with --config")
    if not 0 <= arguments.min_agreement <= 1:
        raise OptionInvalid(f"--min-agreement is {arguments.min_agreement:g}; it is a share, from 0 to 1")
    if arguments.output.exists():
        raise OptionInvalid(f"--output: {arguments.output} exists; name a new folder")
    if not arguments.output.absolute().parent.is_dir():
        raise OptionInvalid(f"--output: {arguments.output.absolute().parent} is no folder; create it first")
    if arguments.config is None and not Path(arguments.source).is_dir():
        raise OptionInvalid(
            f"{arguments.source} is no directory; with --config, SOURCE may be a reference such as acme/legal@prod"
        )


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[tuple[Path, Path, str | None]]:
    """(adapter, base model, revision id if it comes from the catalog)"""
    from cluster.config.load import load_cluster_config
    from cluster.local.named_model import model_of_option

    model = model_of_option(arguments.model or load_cluster_config(arguments.config).model.path)
    if Path(arguments.source).is_dir():
        yield Path(arguments.source), model, None
        return
    with TemporaryDirectory() as folder:
        directory = Path(folder) / "adapter"
        with opened_library(arguments) as library:
            revision_id = library.export(arguments.source, directory).revision_id
        yield directory, model, revision_id


def _converted(arguments: argparse.Namespace, directory: Path, model: Path, revision_id: str | None) -> Converted:
    from adapters.formats import read_adapter
    from adapters.model.base_model import BaseModel
    from adapters.verification.reference import UNLIMITED
    from training.conversion.convert import ConversionOptions, check_teacher, convert
    from training.data.columns import prompt_row
    from training.data.examples import load
    from training.data.tokens import Encoder
    from training.runs.base import default_device, load_base, load_tokenizer

    options = ConversionOptions(
        rank=arguments.rank,
        learning_rate=arguments.learning_rate,
        num_steps=arguments.steps,
        answer_tokens=arguments.answer_tokens,
        seed=arguments.seed,
    )
    teacher = read_adapter(directory, BaseModel.read(model), UNLIMITED)
    check_teacher(teacher)
    encoder = Encoder(*load_tokenizer(model))
    prompts = load(arguments.data, encoder, prompt_row)
    held_out = load(arguments.eval_data, encoder, prompt_row) if arguments.eval_data else None
    device = arguments.device or default_device()
    base = load_base(model, arguments.dtype or ("float32" if device == "cpu" else "bfloat16"), device)
    return convert(base, teacher, prompts, options, held_out=held_out, teacher_id=revision_id, told=sys.stderr)


def _lines(report: Report) -> Iterator[str]:
    before, after = report.before, report.after
    yield f"{report.num_held_out} held-out prompts, beside the teacher    as it was  converted"
    rows: list[tuple[str, float | None, float | None]] = [
        ("the teacher's answer, token for token", before.agreement, after.agreement),
        ("share of it before the first difference", before.agreed_tokens, after.agreed_tokens),
        ("KL, nats a token", before.divergence, after.divergence),
    ]
    if report.teacher_exact_match is not None:
        name = f"the rows' own answer (teacher {report.teacher_exact_match:.3f})"
        rows.append((name, before.exact_match, after.exact_match))
    for name, one, other in rows:
        yield f"{name:42} {one:9.4f}  {other:9.4f}"
    if report.best_step == 0:
        yield "no step brought it nearer to the teacher: try a lower --learning-rate"
    yield (
        f"rank {report.rank}, step {report.best_step} of {report.num_steps}, learning rate "
        f"{report.learning_rate:g}, {report.num_prompts} prompts, {report.seconds:.0f} s"
    )
