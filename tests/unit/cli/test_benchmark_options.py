"""Every option of a benchmark reaches the benchmark: a run with it is asked for something else than one without."""

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.main import _parser, main

pytestmark = pytest.mark.slow

# The functions that a command hands its options to; the first one called counts.
RUNS = {
    "load": ("bench.load.run:run", "bench.load.run:run_sweep"),
    "matrix": ("bench.matrix.run:run",),
    "goodput": ("bench.matrix.goodput:run",),
    "simulate": ("bench.simulator.layouts:run",),
}
# What an option needs to have an effect, and what every run of a command needs.
URL = ("--url", "http://127.0.0.1:1")
NEEDS = {
    "load": URL,
    "load --lora-request-distribution": (*URL, "--adapters", "3"),
    "load --url": (),
    "matrix --all-shares": ("pioneer", "--adapters", "2"),
}
VALUES = (
    ("7",), ("0.37",), ("0.5",), ("3,5",), ("file.json",), ("unified",), ("pair",), ("kill",),
    ("qwen2.5-0.5b",), ("router",), ("lora",), ("json",), ("ttft:3",), ("a=b",), ('{"a": 1}',),
    ("http://127.0.0.1:2",), ("a.json", "b.json"), ("none",),
    ("3u",), ("9+5",), ("9+5@3x2",),
)  # fmt: skip


PARSER = _parser()


class Called(BaseException):
    """The benchmark was called with these arguments."""


def benchmarks() -> Iterator[tuple[str, argparse.Action]]:
    (commands,) = (each for each in PARSER._actions if isinstance(each, argparse._SubParsersAction))
    (group,) = (each for each in commands.choices["bench"]._actions if isinstance(each, argparse._SubParsersAction))
    for name, parser in group.choices.items():
        for action in parser._actions:
            if action.option_strings and "--help" not in action.option_strings:
                yield name, action


OPTIONS = {
    (name, action.option_strings[-1 if len(action.option_strings) < 2 else 0]): action for name, action in benchmarks()
}


def test_every_benchmark_is_looked_at() -> None:
    assert {name for name, _ in OPTIONS} == RUNS.keys()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What a command line asks of its benchmark, as text; None: it is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prelude"])  # results show it
    monkeypatch.setattr("cli.main._parser", lambda: PARSER)  # to make one takes longer than all else

    def call(*arguments: Any, **named: Any) -> None:
        raise Called(repr([each for each in (*arguments, *named.items()) if not callable(each)]))

    for path in {path for paths in RUNS.values() for path in paths}:
        module, name = path.split(":")
        monkeypatch.setattr(importlib.import_module(module), name, call)

    def ask(words: list[str]) -> str | None:
        try:
            main(words)
        except Called as called:
            return str(called)
        except SystemExit:
            return None
        raise AssertionError(f"{words}: nothing ran")

    return ask


# A benchmark that RUNS lacks would really run.
@pytest.mark.parametrize(("benchmark", "option"), [each for each in OPTIONS if each[0] in RUNS])
def test_an_option_changes_what_is_asked(benchmark: str, option: str, asked: Any, capsys: Any) -> None:
    action = OPTIONS[benchmark, option]
    needs = NEEDS.get(f"{benchmark} {option}", NEEDS.get(benchmark, ()))
    without = asked(["bench", benchmark, *needs])
    values = [()] if action.nargs == 0 else [(each,) for each in action.choices or ()] or VALUES
    was_taken = False
    for value in values:
        found = asked(["bench", benchmark, *needs, option, *value])
        was_taken |= found is not None
        if found not in (None, without):
            return
    pytest.fail(f"{option} changes nothing" if was_taken else f"{option} takes none of this test's values")
