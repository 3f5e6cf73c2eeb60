"""A benchmark that is ended early leaves what it has measured, in a file that says that it ended early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import adapter_tax
from bench.errors import SystemFailed
from bench.measuring import report
from bench.measuring.output import growing_json
from bench.options import Options, Shape
from bench.systems import start


class Killed(BaseException):
    """What ends the process; nothing catches it."""


def ended_in(which: int, *, answer: Callable[[], Any], error: BaseException) -> Callable[..., Any]:
    """A measurement whose call of this number fails; the others answer."""
    calls = 0

    async def measure(*_arguments: Any, **_options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == which:
            raise error
        return answer()

    return measure


ERRORS = [(Killed(), "early"), (SystemFailed("it died"), "early: it died")]


@pytest.mark.parametrize(("error", "ended"), ERRORS)
def test_adapter_tax(error: BaseException, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_all(self: start.Starter, say: Any) -> Any:
        return SimpleNamespace(vocabulary=10), [SimpleNamespace(name="none")]

    measured = report.Measurement("none", 0, 0, 6, 1.5, 0.1, 0.0, 0)
    monkeypatch.setattr(start.Starter, "start_all", start_all)
    monkeypatch.setattr(adapter_tax, "_measure", ended_in(2, answer=lambda: measured, error=error))
    path = tmp_path / "tax.json"
    options = Options(("none",), (1,), 1, Shape(8, 4, 2, 6), 8, "engines")
    with pytest.raises(type(error)):
        adapter_tax.run(options, "prelude bench adapter-tax", path, None, print)
    document = json.loads(path.read_text())
    assert document["rows"] == [{"system": "none", "adapters": 0, "requests_per_s": 4.0}]
    assert (len(document["repeats"]), document["ended"]) == (1, ended)


def test_a_file_that_is_there_stays_until_something_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("before")
    with pytest.raises(SystemFailed), growing_json({}, path, "after all"):
        raise SystemFailed("it did not start")
    assert path.read_text() == "before"
    with growing_json({"a": 1}, path, "after all"):
        pass
    assert json.loads(path.read_text()) == {"a": 1, "ended": "after all"}


def test_nothing_is_written_without_a_path() -> None:
    async def run() -> None:
        with growing_json({}, None, "after all") as write:
            write()

    asyncio.run(run())
