"""Types of arguments, and options that several benchmarks have."""

from __future__ import annotations

import argparse
from pathlib import Path

MODELS = ("tiny", "qwen2.5-0.5b", "llama-3.1-8b")  # of bench.systems.models


def add_json(benchmark: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    benchmark.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")


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


def positive_float(text: str) -> float:
    """Raises argparse.ArgumentTypeError."""
    number = not_negative_float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers, separated by commas, each once, the least first. Raises argparse.ArgumentTypeError."""
    return tuple(sorted({positive(word) for word in text.split(",")}))
