"""The plan's arithmetic against what was measured on an H200 (bench/results), and against the fleet simulator."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from bench.simulator.curves import Curves, Decode, Limits, Loads, Prefill
from bench.simulator.outcome import Outcome
from bench.simulator.run import simulate
from bench.simulator.scenario import Pools, Scenario, Slo
from bench.simulator.traffic import Traffic
from cluster.local.memory_plan import GPU_SHARE, ModelSizes, engine_memory
from cluster.planning.adapter_memory import COPIES, AdapterSizes, adapter_memory
from cluster.planning.gpus import GPUS
from cluster.planning.pools import Demand, closed_loop_rate, generating_pool, prefill_pool
from cluster.planning.speed import ADAPTED_DECODE, Coefficients, Speed
from cluster.planning.workload import AdapterKind, Workload

RESULTS = Path(__file__).parents[4] / "bench/results"
H200 = GPUS["h200"]
UNIFIED_8B, UNIFIED_05B = "adapter-tax-h200-llama-3.1-8b-rank16-unified", "adapter-tax-h200-qwen2.5-0.5b-rank16"
LATER_8B = "adapter-tax-h200-llama-3.1-8b-rank16-two-repeats"  # no part of the coefficients
KIND = {"none": "reft", "unified_lora": "lora", "unified_direft": "reft"}  # ReFT costs nothing here


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured(name: str, system: str) -> float:
    """Requests/s, the mean over the numbers of adapters."""
    return mean(row["requests_per_s"] for row in result(name)["rows"] if row["system"] == system)


def speed_of(folder: Path, settings: dict[str, Any], coefficients: Coefficients = Coefficients()) -> Speed:
    sizes = dict(settings["model_sizes"])
    sizes["architectures"] = [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[sizes["model_type"]]]
    (folder / "config.json").write_text(json.dumps(sizes))
    return Speed(ModelSizes.read(folder), H200, 1, coefficients)


def demand_of(shape: dict[str, int], system: str) -> Demand:
    kind = AdapterKind("lora" if KIND[system] == "lora" else "reft", 16)
    return Demand(workload(shape["prompt_tokens"], shape["generated_tokens"], kind), 0.0, 0.0, 0.0)


def workload(prompt_tokens: int, generated_tokens: int, kind: AdapterKind, **changes: Any) -> Workload:
    given = {"requests_per_s": 1.0, "ttft_s": 1.0, "tpot_s": 0.05, "working_set": 8, "total_adapters": 8, **changes}
    return Workload(prompt_tokens=prompt_tokens, generated_tokens=generated_tokens, kinds=(kind,), **given)


def predicted(folder: Path, name: str, system: str) -> float:
    settings = result(name)["settings"]
    shape = settings.get("shape", settings)
    # The file that was written by hand has no sizes.
    sizes = settings if "model_sizes" in settings else result(UNIFIED_8B)["settings"]
    return closed_loop_rate(speed_of(folder, sizes), demand_of(shape, system), shape["concurrency"], "unified")


@pytest.mark.parametrize("name", [UNIFIED_8B, UNIFIED_05B])
@pytest.mark.parametrize("system", KIND)
def test_the_runs_that_coefficients_come_from(name: str, system: str, tmp_path: Path):
    assert predicted(tmp_path, name, system) == pytest.approx(measured(name, system), rel=0.07)


@pytest.mark.parametrize("system", KIND)
def test_a_later_run_of_the_same_sizes(system: str, tmp_path: Path):
    """It had no part in the coefficients, except that the model, the GPU and the lengths are the same."""
    assert predicted(tmp_path, LATER_8B, system) == pytest.approx(measured(LATER_8B, system), rel=0.10)


def test_the_coefficients_follow_from_the_results(tmp_path: Path):
    """Two decode steps, of 8B and of 0.5B, are two equations for bandwidth_share and step_s."""
    steps, readings = [], []
    for name in (UNIFIED_8B, UNIFIED_05B):
        settings = result(name)["settings"]
        speed, shape = speed_of(tmp_path, settings, Coefficients(step_s=0.0)), settings["shape"]
        per_request = 1 / measured(name, "none") - speed.prompt_s(shape["prompt_tokens"], lora_share=0.0)
        steps.append(per_request * shape["concurrency"] / shape["generated_tokens"])
        reading_s = speed.step_s(shape["concurrency"], shape["prompt_tokens"] + shape["generated_tokens"] / 2)
        readings.append(reading_s * Coefficients().bandwidth_share)  # at the data sheet's bandwidth
    share = (readings[0] - readings[1]) / (steps[0] - steps[1])
    assert Coefficients().bandwidth_share == pytest.approx(share, rel=0.05)
    assert Coefficients().step_s == pytest.approx(steps[1] - readings[1] / share, rel=0.05)


def test_decode_with_adapters_on_all_positions_is_as_slow_as_it_was_measured():
    found = []
    for name, system, number in (("all-shares", "unified_lora@1", 32), ("rank16-stock-two-repeats", "stock", 512)):
        rows = result(f"adapter-tax-h200-llama-3.1-8b-{name}")["rows"]
        rates = {(row["system"], row["adapters"]): row["requests_per_s"] for row in rows}
        found.append((number, pytest.approx(rates[system, number] / rates["none", number], abs=0.005)))
    assert list(ADAPTED_DECODE) == found


def test_the_time_of_a_prompt_is_the_measured_one(tmp_path: Path):
    """1,024 requests of 128 tokens for one token each, on an H200 (0.1.0; there is no file)."""
    speed = speed_of(tmp_path, result(UNIFIED_8B)["settings"])
    assert speed.prompt_s(128, lora_share=0.0) * 1000 == pytest.approx(3.37, rel=0.03)
    assert speed.prompt_s(128) * 1000 == pytest.approx(3.74, rel=0.03)


def planned_by_measured_tpot(speed: Speed, probe: dict[str, Any]) -> float:
    """Of a pair's requests of 2048 + 128 tokens."""
    tpot_s = probe["summary"]["tpot_ms"]["mean"] / 1000
    running = probe["summary"]["requests_per_s"] * 128 * tpot_s
    return speed.step_s(running, 2048 + 64) / tpot_s


def test_a_pair_on_another_gpu(tmp_path: Path):
    """Two H100, prompts of 2048 tokens: nothing of that is in the coefficients."""
    h100 = Speed(speed_of(tmp_path, result(UNIFIED_8B)["settings"]).sizes, GPUS["h100-sxm"], 1, Coefficients())
    (sweep,) = result("goodput-h100x2-pair-pages-64")["rows"]
    assert 1 / h100.prompt_s(2048) == pytest.approx(answered_per_s(sweep, 0.0), rel=0.15)  # more were asked for
    for probe in sweep["probes"]:
        assert planned_by_measured_tpot(h100, probe) == pytest.approx(1, rel=0.15)


def two_unified_workers_per_s(speed: Speed, slo_ms: dict[str, float]) -> float:
    """What a plan gives two unified workers of 2048 + 128 tokens within objectives."""
    objectives = {f"{key}_s": limit / 1000 for key, limit in slo_ms.items()}
    wanted = workload(2048, 128, AdapterKind("lora", 16), length_cv=0.0, **objectives)
    memory = engine_memory(speed.sizes, int(speed.gpu.memory_bytes * GPU_SHARE), 1, 0)
    pool = generating_pool(speed, memory, Demand(wanted, 0.0, 0.0, 0.0), "unified")
    assert pool is not None
    return 2 * pool.most_per_s


def answered_per_s(sweep: dict[str, Any], share: float) -> float:
    """The most that was answered where at least this share of the requests met the objectives."""
    return max(probe["summary"]["requests_per_s"] for probe in sweep["probes"] if probe["share"] >= share)


def test_unified_workers_on_another_gpu(tmp_path: Path):
    """The same GPUs as two unified workers: what they held within objectives, of 99 % of the requests."""
    h100 = Speed(speed_of(tmp_path, result(UNIFIED_8B)["settings"]).sizes, GPUS["h100-sxm"], 1, Coefficients())
    by_tpot = {}
    for sweep in result("goodput-h100x2-unified")["rows"]:
        tpot_ms = sweep["slo_ms"]["tpot"]
        answered = answered_per_s(sweep, 0.99 if tpot_ms == 20 else 0.0)
        by_tpot[tpot_ms] = two_unified_workers_per_s(h100, sweep["slo_ms"]) / answered
    assert by_tpot[20] == pytest.approx(1, rel=0.10)
    assert by_tpot[50] == pytest.approx(1, rel=0.15)  # engines were full, with KV memory for sixty requests each


def test_two_h200(tmp_path: Path):
    """The plan's own GPU at a later commit, with long prompts: it promises what a cluster holds, or less."""
    h200 = speed_of(tmp_path, result(UNIFIED_8B)["settings"])
    for file in ("goodput-h200x2-unified", "goodput-h200x2-unified-again"):
        for sweep in result(file)["rows"]:
            if not sweep["ended"]:  # the first file's second sweep was cut off
                assert 0.85 < two_unified_workers_per_s(h200, sweep["slo_ms"]) / answered_per_s(sweep, 0.99) < 1.05
    for sweep in result("goodput-h200x2-pair")["rows"]:
        assert 0.8 < 1 / h200.prompt_s(2048) / answered_per_s(sweep, 0.0) < 1
        for probe in sweep["probes"]:
            assert 1 < planned_by_measured_tpot(h200, probe) < 1.2


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, float]:
    """The number of prefill workers that the plan gives 60 requests/s of 2,000 tokens, and what a prompt costs."""
    speed = speed_of(tmp_path_factory.mktemp("model"), result(UNIFIED_8B)["settings"])
    wanted = workload(
        2000, 1, AdapterKind("lora", 16), requests_per_s=60.0, ttft_s=0.3, working_set=100, total_adapters=100
    )
    memory = engine_memory(speed.sizes, int(H200.memory_bytes * GPU_SHARE), 1, 0)
    pool = prefill_pool(speed, memory, Demand(wanted, 0.0, 0.0, 0.0))
    assert pool is not None
    return pool.num_workers, speed.prompt_s(2000)


def simulated(num_workers: int, cost_s: float, loads: Loads, host_adapters: int = 100) -> Outcome:
    """Workers that only read: 60 requests/s of 2,000 tokens in the mean, under 100 adapters."""
    curves = Curves(
        name="planned", text="", sources={}, prefill=Prefill(((0, 0), (2000, 1000 * cost_s))),
        decode=Decode(((1, 1),)), loads=loads, limits=Limits(chunk_tokens=2000, max_running=1000, slots=100),
    )  # fmt: skip
    traffic = Traffic(60.0, 60.0, num_adapters=100, prompt_tokens=2000, output_tokens=1, length_cv=0.8)
    return simulate(Scenario(curves, Pools(unified=num_workers), traffic, host_adapters=host_adapters, is_warm=False))


def test_the_planned_number_of_workers_is_enough_in_the_simulator(planned: tuple[int, float]):
    """95 % of the requests should have their first token in time."""
    number, cost_s = planned
    enough, fewer = (
        simulated(each, cost_s, Loads(store_ms=1)).summary(Slo(ttft_s=0.3)) for each in (number, number - 1)
    )
    assert enough["good_share"] >= 0.95
    assert fewer["ttft_ms_p99"] > enough["ttft_ms_p99"]


def test_the_planned_host_memory_is_as_good_as_any_in_the_simulator(planned: tuple[int, float], tmp_path: Path):
    """With 1.3 copies of the working set and eight adapters more, the fleet loads no more than with memory for all."""
    number, cost_s = planned
    speed = speed_of(tmp_path, result(UNIFIED_8B)["settings"])
    wanted = workload(2000, 1, AdapterKind("lora", 16), requests_per_s=60.0, working_set=100, total_adapters=100)
    sizes = AdapterSizes.of(wanted, speed.sizes)
    memory = adapter_memory(
        wanted, sizes, number, speed.coefficients, store_bytes_per_s=1.25e9, host_bytes=None, disk_bytes=1 << 40
    )

    def loads(host_adapters: int) -> int:
        each = Loads(store_ms=1000 * memory.load_s, parallel=memory.parallel_loads)
        return simulated(number, cost_s, each, host_adapters).num_loads

    ample, at_plan = loads(100), loads(memory.host_bytes // sizes.mean)
    assert ample <= COPIES * 100
    assert at_plan <= 1.05 * ample
    assert loads(100 // number) > 1.2 * ample  # one copy of each, if they were spread evenly
