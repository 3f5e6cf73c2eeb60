"""Types of arguments, options that several benchmarks have, and the command line in results."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.systems.models import MODELS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")
say = partial(print, flush=True)
_SECRET_OPTION = "--header"  # whose values may have keys or passwords
_HIDDEN = "…"
_IS_PATH = re.compile(r"(/|~/|\.{1,2}/)\S*")
_PASSWORD = re.compile(r"://[^/@\s]*@")


def add_json(benchmark: Any) -> None:
    """Add `--json`."""
    benchmark.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")


def add_engines(benchmark: Any) -> None:
    """Add the options of what engines run."""
    benchmark.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    benchmark.add_argument("--model", choices=MODELS, default="tiny", help="model dimensions; default: tiny")
    benchmark.add_argument("--lora-rank", type=positive, help="default: the workload's; 16 where there are several")
    benchmark.add_argument(
        "--engine-arguments",
        type=lambda text: tuple(shlex.split(text)),
        default=(),
        metavar="TEXT",
        help="additional SGLang arguments for every engine",
    )


def not_negative(text: str) -> int:
    """From 0 on. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return int(text)


def not_negative_float(text: str) -> float:
    """From 0 on. Raises argparse.ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return number


def positive(text: str) -> int:
    """Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def lengths(text: str) -> tuple[int, int]:
    """Tokens of prompts and answers, such as 2048+128."""
    prompt, plus, generated = text.partition("+")
    if not plus:
        raise argparse.ArgumentTypeError(f"{text!r} is no tokens of prompts and answers; write them as 2048+128")
    return positive(prompt), positive(generated)


def positive_float(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    number = not_negative_float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers, separated by commas, each once, the least first. Raises argparse.ArgumentTypeError."""
    return tuple(sorted({positive(word) for word in text.split(",")}))


def with_given(options: Options, arguments: argparse.Namespace) -> Options:
    """The options with what the command line says: arguments are named, or have a `dest`, as their fields are."""
    given = {field.name: getattr(arguments, field.name, None) for field in fields(options)}
    return replace(options, **{name: value for name, value in given.items() if value is not None})


def recorded_command(words: Sequence[str] | None = None) -> str:
    """The command that these words make (None: this process's), without secrets and without this machine's paths.

    Paths from a root or relative to a folder lose their folders. Other slashes stay: `acme/legal` names an adapter.
    """
    shown: list[str] = []
    hides_next = False
    for word in sys.argv[1:] if words is None else words:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if hides_next:
            shown[-1] = f"{shown[-1]}={_HIDDEN}"
        elif option == _SECRET_OPTION and equals:
            shown.append(f"{option}={_HIDDEN}")
        else:
            shown.append(option + equals + _without_folders(_PASSWORD.sub(f"://{_HIDDEN}@", value)))
        hides_next = not hides_next and word == _SECRET_OPTION
    return " ".join(["prelude", *shown])


def _without_folders(value: str) -> str:
    return Path(value).name if _IS_PATH.fullmatch(value) else value
