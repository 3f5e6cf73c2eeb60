"""Plans: numbers worked out by hand, what limits them, and settings that the real schema takes."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import Prelude
from support.engines.model_sizes import GPT_OSS_20B, LLAMA_8B, LLAMA_70B
from support.engines.model_sizes import QWEN3_30B_A3B as MIXTURE

from cluster.agent.engine_spec import base_model_of, fitted_spec
from cluster.config.load import load_cluster_config
from cluster.errors import ConfigError
from cluster.local.memory_plan import ModelSizes
from cluster.planning.adapter_memory import COPIES, AdapterSizes, num_slots
from cluster.planning.gpus import GPUS
from cluster.planning.plan import Plan, Site, make_plan
from cluster.planning.pools import IN_TIME, busiest, wait_s
from cluster.planning.settings import cluster_settings
from cluster.planning.speed import Speed
from cluster.planning.workload import AdapterKind, Workload

MIB = 1024**2
LOAD = Workload(requests_per_s=50.0, prompt_tokens=2000, generated_tokens=300, ttft_s=1.0, tpot_s=0.05, working_set=500)
OPTIONS = ["--requests-per-s", "50", "--prompt-tokens", "2000", "--generated-tokens", "300", "--working-set", "500"]


@pytest.fixture
def sizes(tmp_path: Path) -> Callable[[dict[str, Any]], ModelSizes]:
    def read(config: dict[str, Any]) -> ModelSizes:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelSizes.read(tmp_path)

    return read


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Prelude:
    """`prelude plan` for Llama, unless a test writes the configuration of another model."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return Prelude(capsys, ("plan", "--model", str(tmp_path), *OPTIONS))


def planned(workload: Workload, sizes: ModelSizes, gpu: str = "h200", **site: Any) -> Plan:
    return make_plan(workload, sizes, Site(GPUS[gpu], **site))[0]


def test_adapters_by_hand(sizes):
    """Rank 16 on q, k, v, o: per layer 16 x (8192 + 5120 + 5120 + 8192) x 2 bytes; on all also 3 x 16 x 18432 x 2."""
    model = sizes(LLAMA_8B)
    attention = AdapterKind.parsed("lora:16:attention")
    assert AdapterSizes.of(replace(LOAD, kinds=(attention,)), model).mean == 32 * 16 * 26624 * 2
    assert AdapterSizes.of(LOAD, model).mean == 32 * 16 * (26624 + 3 * 18432) * 2 == 80 * MIB
    assert AdapterSizes.of(replace(LOAD, kinds=(AdapterKind.parsed("reft:8"),)), model).mean == 32 * 8 * 8193 * 2
    some = replace(LOAD, kinds=(AdapterKind.parsed("lora:16:q_proj"),))  # q brings what engines stack with it
    assert AdapterSizes.of(some, model).mean == 32 * 16 * (8192 + 5120 + 5120) * 2
    both = AdapterSizes.of(replace(LOAD, kinds=(AdapterKind.parsed("lora:16:all:3"), AdapterKind("reft", 32))), model)
    reft = 32 * 32 * 8193 * 2
    assert both.mean == math.ceil((3 * 80 * MIB + reft) / 4)
    assert both.largest == 80 * MIB
    assert both.slot == 2 * 80 * MIB + reft  # of rank 32, for LoRA and for ReFT


def test_the_numbers_of_a_plan_fit_together(sizes):
    plan = planned(LOAD, sizes(LLAMA_8B), layouts=("pairs",))
    prefill, decode = plan.pools
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert plan.num_gpus == prefill.num_gpus + decode.num_gpus
    assert prefill.num_workers * prefill.requests_per_s == pytest.approx(50)
    # Little's law, for decode workers
    assert decode.batch == pytest.approx(decode.requests_per_s * 300 * decode.tpot_s, rel=1e-3)
    assert decode.memory.slot_bytes == 0
    assert decode.memory.max_tokens > prefill.memory.max_tokens
    assert plan.kv is not None
    assert plan.kv.bytes_per_prompt == 2000 * 131072
    assert plan.kv.total_bytes_per_s == pytest.approx(50 * 2000 * 131072)
    assert plan.kv.link_bytes_per_s * plan.kv.transfer_s >= plan.kv.bytes_per_prompt
    assert plan.ttft_s == pytest.approx(prefill.wait_s + prefill.prompt_s + plan.kv.transfer_s + decode.tpot_s)
    assert plan.ttft_s <= LOAD.ttft_s
    needed = COPIES * 500 / prefill.num_workers * 80 * MIB
    assert needed < plan.host_bytes < needed + 10 * 80 * MIB


@pytest.mark.parametrize("layout", ["unified", "pairs"])
def test_the_objectives_are_kept_and_one_worker_fewer_would_break_one(sizes, layout: str):
    model = sizes(LLAMA_8B)
    plan = planned(LOAD, model, layouts=(layout,), tensor_parallel=(1,))
    for pool in plan.pools:
        assert pool.requests_per_s <= pool.most_per_s < 50 / (pool.num_workers - 1)
    assert plan.tpot_s <= LOAD.tpot_s
    reading, cost_s = plan.pools[0], Speed(model, GPUS["h200"], 1).prompt_s(2000)
    assert reading.wait_s == pytest.approx(wait_s(reading.requests_per_s, cost_s, 0.8, IN_TIME))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["unified", "pairs"])
def test_a_plan_keeps_the_objectives_or_there_is_none(sizes, layout: str):
    """Of a unified worker both the wait for its turn and the step after it grow with its load."""
    models = [(sizes(LLAMA_8B), "h200"), (sizes(LLAMA_70B), "h100-sxm"), (sizes(MIXTURE), "a100-80g")]
    num_plans, reasons = 0, []
    for (model, gpu), rate, prompt, generated, ttft, tpot, cv in itertools.product(
        models, (2.0, 50.0), (200, 4000), (10, 1000), (0.15, 1.0), (0.03, 0.2), (0.0, 2.0)
    ):
        load = Workload(
            requests_per_s=rate, prompt_tokens=prompt, generated_tokens=generated, ttft_s=ttft, tpot_s=tpot,
            working_set=100, length_cv=cv,
        )  # fmt: skip
        try:
            plan = planned(load, model, gpu, layouts=(layout,))
        except ConfigError as error:
            reasons.append(str(error))
            continue
        assert plan.ttft_s <= ttft, load
        assert plan.tpot_s <= tpot, load
        num_plans += 1
    assert all("--ttft is " in each or "--tpot is " in each for each in reasons)
    assert min(num_plans, len(reasons)) > 10


@pytest.mark.parametrize("layout", ["unified", "pairs"])
@pytest.mark.parametrize(
    ("generated_tokens", "tpot_s", "limit"),
    [
        (500, 1.0, "an engine runs 1024 requests"),
        (500, 0.01, "tokens would come too slowly"),  # long before there are so many
        (1000, 1.0, "KV memory would be full"),
    ],
)
def test_what_limits_an_engine_that_generates(sizes, layout: str, generated_tokens: int, tpot_s: float, limit: str):
    load = replace(LOAD, prompt_tokens=20, generated_tokens=generated_tokens, ttft_s=5.0, tpot_s=tpot_s, working_set=10)
    assert planned(load, sizes(LLAMA_8B), layouts=(layout,), tensor_parallel=(1,)).pools[-1].limit == limit


def test_faster_gpus_and_less_work_need_no_more_gpus(sizes):
    model = sizes(LLAMA_8B)
    by_gpu = [planned(LOAD, model, gpu).num_gpus for gpu in ("l40s", "a100-80g", "h100-sxm", "h200", "b200")]
    assert by_gpu == sorted(by_gpu, reverse=True)
    base = planned(LOAD, model).num_gpus
    for easier in ({"requests_per_s": 10.0}, {"prompt_tokens": 500}, {"generated_tokens": 50}, {"shared_prefix": 0.5}):
        assert planned(replace(LOAD, **easier), model).num_gpus < base, easier
    for harder in ({"ttft_s": 0.2}, {"tpot_s": 0.015}, {"length_cv": 3.0}):
        assert planned(replace(LOAD, **harder), model).num_gpus > base, harder


def test_large_models_are_divided(sizes):
    plan = planned(LOAD, sizes(LLAMA_70B), "h100-sxm", layouts=("pairs",))
    assert all(pool.tensor_parallel >= 4 for pool in plan.pools)  # 141 GB of weights, 68 GB usable
    assert all(pool.memory.is_enough for pool in plan.pools)
    with pytest.raises(ConfigError, match=r"tensor parallel 1: no room for KV, \(63\.3 GiB usable - 131\.\d GiB"):
        planned(LOAD, sizes(LLAMA_70B), "h100-sxm", tensor_parallel=(1,))


def test_experts(sizes):
    """Few weights compute a token, and most are read once batches are large."""
    speed = Speed(sizes(MIXTURE), GPUS["h200"], 1)
    dense = 2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 2048  # q, o, k, v and the router of one layer
    expert = 3 * 768 * 2048
    assert speed._weights(1) == pytest.approx(48 * (dense + 8 * expert))
    assert speed._weights(10_000) == pytest.approx(48 * (dense + 128 * expert))
    assert planned(LOAD, sizes(MIXTURE)).num_gpus <= planned(LOAD, sizes(LLAMA_8B)).num_gpus + 1


def test_experts_in_mxfp4_are_read_as_they_are_stored(sizes):
    """One token reads 4 of 32 experts of each layer, at 17/32 bytes a weight, and all else in bfloat16."""
    gpu = GPUS["h200"]
    speed = Speed(sizes(GPT_OSS_20B), gpu, 1)
    dense = 24 * (2 * 4096 * 2880 + 2 * 512 * 2880 + 32 * 2880) + 201088 * 2880
    read = 2 * dense + 24 * 4 * 3 * 2880 * 2880 * 17 / 32
    each = speed.coefficients
    read_s = read / (gpu.memory_bytes_per_s * each.bandwidth_share)
    assert speed.step_s(1, 0) == pytest.approx(read_s + each.step_s + each.sequence_s)


def test_objectives_that_nothing_keeps_are_named(sizes):
    model = sizes(LLAMA_8B)
    with pytest.raises(ConfigError, match=r"decode worker on l40s.*a token alone takes .* ms, and --tpot is 2 ms"):
        planned(replace(LOAD, tpot_s=0.002), model, "l40s", tensor_parallel=(1,))
    with pytest.raises(ConfigError, match=r"a prompt alone takes .* ms.*--ttft is 10 ms"):
        planned(replace(LOAD, ttft_s=0.01), model)
    with pytest.raises(ConfigError, match="make 140000 tokens, and the model takes 131072"):
        planned(replace(LOAD, prompt_tokens=139_700), model)
    with pytest.raises(ConfigError, match="and a pool has 1024"):
        planned(replace(LOAD, requests_per_s=1e6), model)


def test_a_slow_link_is_refused(sizes):
    model = sizes(LLAMA_8B)
    fast = planned(LOAD, model, layouts=("pairs",), kv_bytes_per_s=50e9)
    assert fast.kv is not None
    assert fast.kv.transfer_s == pytest.approx(2000 * 131072 / 50e9)
    with pytest.raises(ConfigError, match=r"--kv-gbit: a worker's link would carry .* more than half of 20"):
        planned(LOAD, model, layouts=("pairs",), kv_bytes_per_s=20e9 / 8)


def test_prefixes_that_do_not_fit_the_cache_are_not_counted_on(sizes):
    model = sizes(LLAMA_8B)
    shared = replace(LOAD, shared_prefix=0.5)
    assert planned(shared, model).cached_share == 0.5
    many = planned(replace(shared, working_set=10_000), model)
    assert many.cached_share < 0.2
    assert many.num_gpus > planned(shared, model).num_gpus
    # What is counted on has room: 1.3 copies of each adapter's prefix.
    pool = many.pools[0]
    kept = many.cached_share / 0.5 * 10_000 * COPIES * 1000
    assert kept <= pool.num_workers * (pool.memory.max_tokens - busiest(pool.batch) * 2300) * 1.01


def test_slots_are_as_many_as_a_batch_has_prompts():
    assert num_slots(LOAD, 2000, 2048) == 8
    assert num_slots(LOAD, 100, 2048) == 32  # 21 prompts
    assert num_slots(replace(LOAD, working_set=3), 100, 2048) == 3


def test_one_worker_has_one_copy(sizes):
    plan = planned(replace(LOAD, requests_per_s=2.0), sizes(LLAMA_8B), layouts=("unified",))
    assert plan.pools[0].num_workers == 1
    assert plan.host_bytes == 508 * 80 * MIB


def test_waits():
    """M/M/1 (cv 1): the p-quantile of the wait is s / (1 - rho) ln(rho / (1 - p))."""
    assert wait_s(0.5, 1.0, 1.0, 0.95) == pytest.approx(2 * math.log(10))
    assert wait_s(0.04, 1.0, 1.0, 0.95) == 0.0  # fewer than 5 % wait at all
    assert wait_s(1.0, 1.0, 1.0, 0.95) == math.inf


@pytest.mark.parametrize(
    ("config", "layout", "roles"),
    [
        (LLAMA_70B, "pairs", {"prefill", "decode"}),
        (MIXTURE, "pairs", {"prefill", "decode"}),
        (LLAMA_8B, "unified", {"unified"}),
    ],
)
def test_the_cluster_yaml_is_taken_by_what_reads_it(
    config: dict[str, Any], layout: str, roles: set[str], tmp_path: Path, plan
):
    kinds = ["--adapter", "lora:32:attention:0.5", "--adapter", "reft:8"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = plan.prints("--layout", layout, *kinds, "--cluster-yaml")
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    loaded = load_cluster_config(path)
    assert {worker.role for worker in loaded.workers.values()} == roles
    base = base_model_of(loaded)
    for name in loaded.workers:
        fitted_spec(loaded, name, tmp_path, base)
    assert loaded.adapter_limits.max_rank == 32
    assert loaded.adapter_limits.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_the_table_has_what_the_settings_have(plan):
    table = plan.prints("--gpu", "H200")
    values = yaml.safe_load(plan.prints("--gpu", "H200", "--helm-values"))
    pools = {role: pool["main"] for role, pool in values["pools"].items()}
    assert table.startswith(
        f"{sum(each['replicas'] for each in pools.values())} x h200: "
        + " + ".join(f"{each['replicas']} {role}" for role, each in pools.items())
    )
    assert all(str(each["engine"]["max_total_tokens"]) in table for each in pools.values())
    assert "Shares of the GPU's peaks were measured on this kind of GPU" in table


def test_another_dtype_than_the_checkpoints(plan: Prelude, tmp_path: Path):
    planned_in_bfloat16 = plan.prints("--cluster-yaml")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "torch_dtype": "float32"}))
    plan.refuses("--cluster-yaml", says="give --dtype bfloat16", status=2)
    assert plan.prints("--cluster-yaml", "--dtype", "bfloat16") == planned_in_bfloat16


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_a_model_in_fp8_is_half_as_large_without_its_files(method: str, sizes, plan: Prelude, tmp_path: Path):
    """But for its embeddings, and its KV."""
    model = {**LLAMA_8B, "quantization_config": {"quant_method": method}}
    plain, quantised = sizes(LLAMA_8B), sizes(model)
    layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert plain.weight_bytes - quantised.weight_bytes == layers
    assert plain.kv_bytes_per_token == quantised.kv_bytes_per_token
    whole, half = (Speed(each, GPUS["h200"], 1) for each in (plain, quantised))
    read = (2 * layers + 2 * 128256 * 4096, layers + 2 * 128256 * 4096)
    assert whole._read_weights_s(1) / half._read_weights_s(1) == pytest.approx(read[0] / read[1])
    (tmp_path / "config.json").write_text(json.dumps(model))
    said = "- Weights are 8.5 GiB, by config.json, as there are no weights.\n"
    assert said in plan.prints("--dtype", "float16")


def test_experts_in_fp8_are_read_as_they_are_stored(sizes):
    plain, quantised = sizes(MIXTURE), sizes({**MIXTURE, "quantization_config": {"quant_method": "fp8"}})
    whole, half = (Speed(each, GPUS["h200"], 1)._read_weights_s(1) for each in (plain, quantised))
    assert 0.5 < half / whole < 0.6


@pytest.mark.parametrize("method", ["awq", ["fp8"], None])
def test_a_quantisation_that_is_not_counted_is_named(method: Any, plan: Prelude, tmp_path: Path):
    model = {**LLAMA_8B, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert f"and without its quantisation {str(method)!r}, whose sizes are not known." in plan.prints()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--gpu", "v100"], "--gpu 'v100' is not in the table; give the most similar of a100-80g, "),
        (["--adapter", "lora"], "expected KIND:RANK"),
        (["--adapter", "ia3:16"], "its kind is 'ia3'"),
        (["--adapter", "lora:0"], "its rank is '0'; give a number from 1 to 512"),
        (["--adapter", "lora:00000112"], "its rank is '00000112'"),
        (["--adapter", "lora:16:qproj"], "no projection is called qproj; give all, attention, mlp"),
        (["--adapter", "lora:16:all:-1"], "its share is '-1'"),
        (["--shared-prefix", "1.5"], "--shared-prefix is 1.5; give a value from 0 to 0.99"),
        (["--kv-gbit", "0"], "--kv-gbit is 0; give a positive number"),
        (["--tensor-parallel", "0"], "--tensor-parallel is 0"),
        (["--tensor-parallel", "3"], "tensor parallel 3 does not divide the model"),
        (["--model", "/nowhere"], "--model: /nowhere/config.json cannot be read"),
        (["--tpot", "nan"], "--tpot is nan; give a value from"),
    ],
)
def test_bad_input_is_named_with_what_would_be_right(options: list[str], problem: str, plan):
    plan.refuses(*options, says=problem, status=2)


def test_slots_of_experts_are_counted(sizes):
    """Of 48 layers with 128 experts each: rank 8, 3 (2048 + 768) columns and rows, in 2 bytes."""
    mixture = sizes(MIXTURE)
    attention = replace(LOAD, kinds=(AdapterKind.parsed("lora:8:attention"),))
    both = replace(LOAD, kinds=(AdapterKind.parsed("lora:8:attention+experts"), AdapterKind.parsed("lora:16:q_proj")))
    larger = replace(LOAD, kinds=(AdapterKind.parsed("lora:16:attention"),))
    more = AdapterSizes.of(both, mixture).slot - AdapterSizes.of(larger, mixture).slot
    assert more == 48 * 128 * 8 * 3 * (2048 + 768) * 2
    with_experts, without = planned(both, mixture), planned(attention, mixture)
    limits = cluster_settings(with_experts, both, mixture, Path("m"))["adapter_limits"]
    assert (limits["max_rank"], limits["max_expert_rank"]) == (16, 8)
    assert "max_expert_rank" not in cluster_settings(without, attention, mixture, Path("m"))["adapter_limits"]
    assert with_experts.pools[0].memory.max_tokens < without.pools[0].memory.max_tokens
    only = AdapterKind.parsed("lora:8:experts")
    assert (only.targets, only.experts) == ((), True)
    with pytest.raises(ConfigError, match="has no experts"):
        planned(both, sizes(LLAMA_8B))
    with pytest.raises(ConfigError, match=r"adapt none of gate_proj\+up_proj\+down_proj"):
        planned(replace(LOAD, kinds=(AdapterKind.parsed("lora:16:mlp"),)), sizes(MIXTURE))
