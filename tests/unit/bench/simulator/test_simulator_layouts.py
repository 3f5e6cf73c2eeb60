"""Layouts are compared, the file has what its page says, curves are read and refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.simulator.curves import FOLDER, EngineTimes, read_curves
from bench.simulator.layouts import bound_per_s, highest_rate, layouts, request_s, run
from bench.simulator.options import Options
from bench.systems.layout import Layout
from bench.systems.models import config_of
from cluster.local.memory_plan import GPU_SHARE, ModelSizes, engine_memory
from cluster.planning.gpus import GPUS
from cluster.planning.speed import Speed

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[4] / "docs" / "simulator.md"
H200_8B = "h200-llama-3.1-8b"
SMALL = Options(prompt_tokens=512, output_tokens=32, num_adapters=50, seconds=3.0, warm_up_s=0.5, gpus=4)


def test_the_kept_curves_are_the_planners_formulas(tmp_path: Path) -> None:
    """LoRA of rank 16 on all projections, 32 slots, as docs/simulator.md says."""
    curves, gpu = read_curves(H200_8B), GPUS["h200"]
    config, _ = config_of("llama-3.1-8b")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    sizes = ModelSizes.read(tmp_path)
    speed, times = Speed(sizes, gpu, 1), EngineTimes(curves)
    for tokens in (1024, 2048, 8192):
        alone_s = speed.prompt_s(tokens) + speed.coefficients.step_s
        assert times.batch_s(tokens, 1, tokens**2 / 2, 1.0) == pytest.approx(alone_s, rel=0.01)
    for number in (1, 32, 256):
        step_s = times.steps_s[number] + times.kv_token_s * number * 1000
        assert step_s == pytest.approx(speed.step_s(number, 1000), rel=0.01)
    slots = (curves.limits.slots + 1) * sizes.adapter_bytes(16)
    assert curves.limits.max_kv_tokens == engine_memory(sizes, int(gpu.memory_bytes * GPU_SHARE), 1, slots).max_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": {"batch_ms": []}}, "no points"),
        ({"prefill": {"batch_ms": [[2, 1], [1, 2]]}}, "ascending"),
        ({"decode": {"step_ms": [[1, -1]]}}, "negative"),
        ({"limits": {"slots": 0}}, "at least 1"),
        ({"limits": {"prompts_wait_steps": -1}}, "negative"),
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
    layout = Layout(unified=1)
    strict, loose = (highest_rate(replace(SMALL, tpot_ms=tpot_ms), layout)["requests_per_s"] for tpot_ms in (8, 100))
    assert 0 <= strict < loose <= 1.1 * bound_per_s(SMALL, layout)


def test_layouts_have_all_the_gpus() -> None:
    for number in (2, 4, 8, 11):
        found = list(layouts(number))
        assert {len(layout.roles) for layout in found} == {number}
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
    options = Options(prompt_tokens=1024, output_tokens=128, num_adapters=0)
    assert bound_per_s(options, Layout(prefill=3, decode=1)) == pytest.approx(min(3 / read_s, 1 / generate_s))
    assert bound_per_s(options, Layout(unified=4)) == pytest.approx(4 / (read_s + generate_s))


def test_the_file_has_every_layout_and_the_fields_of_the_page(tmp_path: Path) -> None:
    lines: list[str] = []
    run(replace(SMALL, gpus=2, seconds=0.5, tpot_ms=100.0), "prelude bench simulate", tmp_path / "s.json", lines.append)
    document = json.loads((tmp_path / "s.json").read_text())
    assert [row["layout"] for row in document["rows"]] == ["2u", "1p+1d"]
    assert len(lines) == 4
    assert lines[-1].startswith(max(document["rows"], key=lambda row: row["requests_per_s"])["layout"])
    of_file, of_rows = PAGE.read_text().split("\n## The file\n")[1].split("\n## ")[0].split("`rows`", 1)
    assert {*re.findall(r"`(\w+)`", of_file), "rows"} == document.keys()
    assert set(re.findall(r"`(\w+)`", of_rows)) == {name for row in document["rows"] for name in row}


def test_given_layouts_are_simulated_instead() -> None:
    given = replace(SMALL, layouts=("1p+1d", "1u"), seconds=0.5, tpot_ms=100.0)
    rows = run(given, "", None, lambda _: None)["rows"]
    assert [row["layout"] for row in rows] == ["1p+1d", "1u"]
    assert all(row["requests_per_s"] for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"share": 1.5}, "--share"), ({"gpus": 1}, "--gpus 1"), ({"layouts": ("2u", "1p")}, "layout '1p'")],
)
def test_options_have_bounds(change: dict, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        run(replace(SMALL, **change), "", None, print)
