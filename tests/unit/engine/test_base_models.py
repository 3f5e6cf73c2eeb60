"""Target modules of engines for each kind of base model, and base models that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.engines.running_engine import engine_spec

from adapters.model.base_model import MODULES, BaseModel, Experts
from engine.arguments import AdapterSlots, EngineSpec
from engine.base_models import fitted_to
from engine.errors import BaseModelNotRun

DENSE = BaseModel(
    "LlamaForCausalLM", num_layers=3, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=12, vocabulary=150
)
MIXTURE = replace(DENSE, architecture="Qwen3MoeForCausalLM", experts=Experts(5, 20, (0, 1, 2)))
MIXTRAL = replace(DENSE, architecture="MixtralForCausalLM", experts=Experts(5, 48, (0, 1, 2)))
GLM = replace(DENSE, architecture="Glm4MoeForCausalLM", experts=Experts(5, 20, (1, 2)))
GPT_OSS = replace(DENSE, architecture="GptOssForCausalLM", experts=Experts(5, 48, (0, 1, 2)))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def spec(modules: tuple[str, ...] | None) -> EngineSpec:
    adapters = None if modules is None else AdapterSlots(2, 16, modules)
    role, changes = "decode" if modules is None else "unified", {"device": "cpu", "port": 1, "tensor_parallel": 1}
    return engine_spec(role, Path("m"), Path("s"), adapters=adapters, **changes)


def modules_of(fitted: EngineSpec) -> tuple[str, ...]:
    assert fitted.adapters is not None
    return fitted.adapters.target_modules


def test_slots_are_for_what_engines_adapt():
    assert fitted_to(spec(MODULES), DENSE) == spec(MODULES)
    for mixture in (MIXTURE, MIXTRAL, GLM):
        assert modules_of(fitted_to(spec(MODULES), mixture)) == ATTENTION
        assert modules_of(fitted_to(spec(("up_proj", "q_proj")), mixture)) == ("q_proj",)
        assert fitted_to(spec(None), mixture) == spec(None)


def test_experts_have_slots_where_they_have_a_rank():
    """SGLang adapts gate, up and down of experts together only."""
    limited = spec(("up_proj", "q_proj"))
    assert limited.adapters is not None
    with_rank = replace(limited, adapters=replace(limited.adapters, max_expert_rank=4))
    for mixture in (MIXTURE, MIXTRAL):
        fitted = fitted_to(with_rank, mixture)
        assert modules_of(fitted) == ("q_proj", "gate_proj", "up_proj", "down_proj")
        assert fitted.adapters is not None
        assert fitted.adapters.max_expert_rank == 4
    assert fitted_to(with_rank, DENSE) == limited
    assert fitted_to(with_rank, GLM).adapters == AdapterSlots(2, 16, ("q_proj",))
    assert fitted_to(limited, MIXTURE).adapters == AdapterSlots(2, 16, ("q_proj",))


def test_slots_for_nothing_are_refused():
    with pytest.raises(BaseModelNotRun, match=r"names gate_proj, down_proj, of which engines .* adapt none"):
        fitted_to(spec(("gate_proj", "down_proj")), MIXTURE)


@pytest.mark.parametrize("modules", [MODULES, None])
def test_layers_without_experts_are_refused_in_every_role(modules):
    """The engine would serve them with random weights, without an error."""
    for architecture in ("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"):
        some = replace(MIXTURE, architecture=architecture, experts=Experts(5, 20, (0, 2)))
        with pytest.raises(BaseModelNotRun, match=f"layers without experts.*{architecture}"):
            fitted_to(spec(modules), some)


@pytest.mark.parametrize(
    ("model", "ranks"), [(DENSE, 2), (replace(DENSE, intermediate=128), 4), (replace(MIXTRAL, kv_heads=1), 2)]
)
def test_shares_that_sglang_pads_on_cpus_are_refused(model: BaseModel, ranks: int):
    """LoRA on up_proj of 160 rows was off by log-probabilities of 2 on two ranks."""
    divided = replace(spec(MODULES), tensor_parallel=ranks)
    with pytest.raises(BaseModelNotRun, match=f"tensor_parallel is {ranks} on CPUs, where SGLang pads"):
        fitted_to(divided, model)
    fitted_to(replace(divided, device="cuda"), model)
    fitted_to(replace(spec(None), tensor_parallel=ranks), model)


def test_shares_that_need_no_padding():
    for model in (replace(DENSE, intermediate=128), GLM, MIXTURE, replace(MIXTURE, intermediate=46)):
        fitted_to(replace(spec(MODULES), tensor_parallel=2), model)
    as_text = fitted_to(spec(None), replace(DENSE, architecture="Qwen3VLForConditionalGeneration"))
    assert as_text.model_overrides == '{"language_model_only": true}'


@pytest.mark.parametrize("modules", [MODULES, None])
def test_sinks_on_cpus_are_refused_in_every_role(modules):
    with pytest.raises(BaseModelNotRun, match=r"device is cpu, where .* no sinks, and GptOssForCausalLM .*on GPUs"):
        fitted_to(spec(modules), GPT_OSS)
    other = replace(spec(modules), extra_arguments=("--attention-backend", "another"))
    for possible in (other, replace(spec(modules), device="cuda")):
        assert fitted_to(possible, GPT_OSS).role == possible.role


@pytest.mark.parametrize("modules", [MODULES, None])
@pytest.mark.parametrize(
    ("device", "dtype", "says"),
    [
        ("cuda", "bfloat16", ""),
        ("cuda", "float16", "on cuda in float16"),
        ("cpu", "bfloat16", "on cpu in bfloat16"),
    ],
)
def test_mxfp4_runs_on_gpus_in_bfloat16(modules, device: str, dtype: str, says: str):
    """SGLang computes in bfloat16 whatever it is told, and adapters would come in another dtype."""
    model, asked = replace(MIXTURE, has_mxfp4=True), replace(spec(modules), device=device, dtype=dtype)
    if says:
        with pytest.raises(BaseModelNotRun, match=rf"weights in MXFP4.*{says}: set device and model.dtype"):
            fitted_to(asked, model)
    else:
        assert fitted_to(asked, model) == fitted_to(asked, MIXTURE)
