"""Questions to the simulator: small ones are answered, files hold what was asked, curves are read and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.errors import BenchError
from bench.simulator.curves import FOLDER, EngineTimes, names, read_curves
from bench.simulator.planned import H200_8B, h200_llama_8b
from bench.simulator.questions import report
from bench.simulator.questions.layouts import layouts
from bench.simulator.questions.options import Options
from bench.simulator.questions.search import bound_per_s, highest_rate, request_s
from bench.simulator.scenario import Pools
from cli.bench import simulate as command

pytestmark = pytest.mark.slow

SMALL = Options(
    requests_per_s=30.0, prompt_tokens=512, output_tokens=32, num_adapters=50, seconds=3.0, warm_up_s=0.5, gpus=4
)


def test_the_kept_curves_follow_from_the_results() -> None:
    assert read_curves(H200_8B) == h200_llama_8b(), "run: python -m bench.simulator.planned"


@pytest.mark.parametrize("name", names())
def test_kept_curves_name_their_sources(name: str) -> None:
    curves = read_curves(name)
    assert curves.name == name
    assert curves.sources
    times = EngineTimes(curves)
    assert 0 < times.steps_s[1] <= times.steps_s[-1]
    assert 0 < times.batch_s(1, 1, 0, 0.0) <= times.batch_s(2048, 1, 0, 0.0) <= times.batch_s(2048, 1, 0, 1.0)
    assert times.transfer_s(512) <= times.transfer_s(4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": {"batch_ms": []}}, "no points"),
        ({"prefill": {"batch_ms": [[2, 1], [1, 2]]}}, "ascending"),
        ({"decode": {"step_ms": [[1, -1]]}}, "negative"),
        ({"limits": {"slots": 0}}, "at least 1"),
        ({"decode": {"step": 1}}, "decode"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_damaged_curves_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    found = json.loads((FOLDER / f"{H200_8B}.json").read_text())
    (tmp_path / "curves.json").write_text(json.dumps(found | change))
    with pytest.raises(BenchError, match=message):
        read_curves(str(tmp_path / "curves.json"))


def test_missing_curves_are_named() -> None:
    with pytest.raises(BenchError, match=H200_8B):
        read_curves("no-such-curves")


def test_the_highest_rate_is_below_the_bound_and_grows_with_the_objective() -> None:
    pools = Pools(unified=1)
    strict, loose = (highest_rate(replace(SMALL, tpot_ms=tpot_ms), pools)["requests_per_s"] for tpot_ms in (8, 100))
    assert 0 <= strict < loose <= 1.1 * bound_per_s(SMALL, pools)


def test_layouts_have_all_the_gpus() -> None:
    for number in (2, 4, 8, 11):
        found = list(layouts(number))
        assert {pools.num_workers for pools in found} == {number}
        assert len(set(found)) == len(found)


def test_a_request_costs_what_full_batches_say() -> None:
    """The sum of `bound_per_s`, by hand: half a chunk without adapters, and 127 steps with 256 others."""
    curves = read_curves(H200_8B)
    read_s, generate_s = request_s(curves, 1024, 128, 0.0)
    attention_s = 1e-9 * curves.prefill.pair_ns * 1024**2 / 2
    assert read_s == pytest.approx(
        (0.5 * curves.prefill.batch_ms[7][1] + curves.prefill.prompt_ms) / 1000 + attention_s
    )
    step_ms = curves.decode.step_ms[-1][1] + 1e-6 * curves.decode.kv_token_ns * 256 * (1024 + 64)
    assert generate_s == pytest.approx(127 * step_ms / 1000 / 256)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rack", "ratios", "roles", "scale"])
def test_questions_are_answered_in_small(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.simulator.questions import layouts as of_layouts
    from bench.simulator.questions import losses as of_losses
    from bench.simulator.questions import scale as of_scale

    monkeypatch.setattr(of_layouts, "PHASE_S", 4.0)
    for name_of, seconds in (("BEFORE_S", 4.0), ("AFTER_S", 12.0), ("BACK_S", 8.0)):
        monkeypatch.setattr(of_losses, name_of, seconds)
    monkeypatch.setattr(of_layouts, "SHAPES", ((512, 16),))
    monkeypatch.setattr(of_layouts, "TPOTS_MS", (100.0,))
    monkeypatch.setattr(of_scale, "SAMPLES", ((0.001, 0.5),))
    tiny = replace(report.quick(SMALL), seconds=0.5)
    lines: list[str] = []
    report.run((name,), tiny, "prelude bench simulate", tmp_path / "s.json", lines.append)
    document = json.loads((tmp_path / "s.json").read_text())
    rows = document["answers"][name]
    assert rows
    assert len(lines) > 2
    assert document["curves"]["sources"]
    if name == "rack":
        assert all(row["requests"] == row["served"] + row["cut"] + row["failed"] + row["refused"] for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"requests_per_s": 0.0}, "--rate 0"), ({"share": 1.5}, "--share"), ({"gpus": 1}, "--gpus 1")],
)
def test_options_have_bounds(change: dict, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        replace(SMALL, **change).check()


def test_questions_and_folders_that_are_not_there() -> None:
    for arguments, message in (
        ((("why",), SMALL, "", None), "why"),
        ((("scale",), SMALL, "", Path("/no/such/x.json")), "no folder"),
    ):
        with pytest.raises(BenchError, match=message):
            report.run(*arguments, lambda _line: None)


def test_the_command_line_knows_the_questions_and_the_defaults() -> None:
    assert tuple(report.QUESTIONS) == command.QUESTIONS
    assert msgspec.to_builtins(Options())["requests_per_s"] == 100
