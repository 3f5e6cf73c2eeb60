"""A benchmark that is ended early leaves what it has measured, in a file that says that it ended early."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import adapter_tax, cold_load, slot_swaps
from bench.errors import SystemFailed
from bench.measuring import report
from bench.measuring.output import growing_json
from bench.options import Options, Shape
from bench.simulator.curves import read_curves
from bench.simulator.validation import check
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
def test_slots(error: BaseException, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"adapters": 2, "repeat": 0, "requests_per_s": 4.0, "first_token_p50_ms": 1.0, "first_token_p95_ms": 2.0}
    monkeypatch.setattr(slot_swaps, "write_model", lambda *_: None)
    monkeypatch.setattr(slot_swaps, "BaseModel", SimpleNamespace(read=lambda _: SimpleNamespace(vocabulary=10)))
    monkeypatch.setattr(slot_swaps, "prepare_adapters", lambda *_: [])
    monkeypatch.setattr(slot_swaps, "running_engine", lambda _: contextlib.AsyncExitStack())
    monkeypatch.setattr(slot_swaps, "load_adapters", ended_in(0, answer=lambda: None, error=error))
    monkeypatch.setattr(slot_swaps, "_measure", ended_in(2, answer=lambda: row, error=error))
    path = tmp_path / "slots.json"
    with pytest.raises(type(error)):
        slot_swaps.run(slot_swaps.QUICK, "prelude bench slots", path, print)
    document = json.loads(path.read_text())
    assert (document["rows"], document["ended"]) == ([row], ended)
    assert [each["adapters"] for each in document["medians"]] == [2]


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


@pytest.mark.parametrize(("error", "ended"), ERRORS)
def test_cold_load(error: BaseException, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        workers={"unified-0": SimpleNamespace(host="127.0.0.1", control_port=1, metrics_port=1)},
        residency=SimpleNamespace(lease_s=0.0),
    )

    @contextlib.asynccontextmanager
    async def cluster(*_arguments: Any):
        yield SimpleNamespace(config=config, url="http://127.0.0.1:1")

    monkeypatch.setattr(cold_load, "_prepare", lambda *_: config)
    monkeypatch.setattr(cold_load, "local_cluster", cluster)
    monkeypatch.setattr(cold_load._Bench, "_revision_of", ended_in(0, answer=lambda: "sha256:a", error=error))
    monkeypatch.setattr(cold_load._Bench, "_stages", ended_in(0, answer=lambda: {"engine": (1.0, 1.0)}, error=error))
    # Two repeats of two adapters each: the second repeat does not get ready.
    monkeypatch.setattr(cold_load._Bench, "_ready_s", ended_in(4, answer=lambda: 0.25, error=error))
    path = tmp_path / "cold.json"
    with pytest.raises(type(error)):
        cold_load.run(
            cold_load.Options(repeats=2, num_single=1, at_once=1, device="cuda"), "prelude bench cold-load", path, print
        )
    document = json.loads(path.read_text())
    assert (document["one_cold_ms"], document["ended"]) == (250.0, ended)


@pytest.mark.parametrize(("error", "ended"), ERRORS)
def test_validation(error: BaseException, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def cluster(*_arguments: Any):
        yield SimpleNamespace(url="http://127.0.0.1:1")

    engine = SimpleNamespace(chunked_prefill_tokens=1, max_running_requests=1, max_total_tokens=1)
    curves = read_curves("h200-llama-3.1-8b")
    monkeypatch.setattr(check, "_prepare", lambda *_: SimpleNamespace(engine=engine))
    monkeypatch.setattr(check, "local_cluster", cluster)
    monkeypatch.setattr(check, "measure_curves", ended_in(0, answer=lambda: curves, error=error))
    monkeypatch.setattr(check, "_compare", ended_in(2, answer=lambda: {"load": 0.3}, error=error))
    path, curves_path = tmp_path / "validated.json", tmp_path / "curves.json"
    with pytest.raises(type(error)):
        check.run(check.Options(), "prelude bench simulate --validate", path, curves_path, print)
    document = json.loads(path.read_text())
    assert (document["rows"], document["ended"]) == ([{"load": 0.3}], ended)
    assert document["curves"]["name"] == curves.name
    assert read_curves(str(curves_path)) == curves


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
