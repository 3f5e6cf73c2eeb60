import pytest
import torch
from support.adapters.random_adapters import ALL_FUSED, write_random_lora, write_random_mixed, write_random_reft
from support.adapters.reference_answers import answer, answer_from_directory

from adapters.formats import read_adapter
from adapters.verification.reference import adapted, peft_adapted

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]

LORAS = {
    "all": {},
    "q alone": {"modules": ["q_proj"], "rank": 2},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"mlp.up_proj": 64}, "use_rslora": True},
    "some layers": {"layers": [1]},
    "zero": {"zero": True},
}


def close(first, second, tolerance):
    assert first.tokens == second.tokens
    assert first.logprobs == pytest.approx(second.logprobs, abs=tolerance)
    assert first.prompt_logprobs[0] is second.prompt_logprobs[0] is None
    assert first.prompt_logprobs[1:] == pytest.approx(second.prompt_logprobs[1:], abs=tolerance)


@pytest.mark.parametrize("name", LORAS)
@pytest.mark.parametrize("positions", ["prefill", "all"])
def test_normal_form_and_peft_agree(name, positions, model, base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=3, **LORAS[name])
    ours = answer(model, read_adapter(directory, base, limits), PROMPT, 8, positions)
    theirs = answer_from_directory(model, directory, PROMPT, 8, positions)
    assert (ours.method, theirs.method) == ("normal_form", "peft")
    close(ours, theirs, 1e-5)
    with torch.inference_mode(), adapted(model, read_adapter(directory, base, limits)):
        ours_logits = model(torch.tensor([PROMPT])).logits
    with torch.inference_mode(), peft_adapted(model, directory) as peft_model:
        theirs_logits = peft_model(torch.tensor([PROMPT])).logits
    scale = theirs_logits.abs().max()
    assert (ours_logits - theirs_logits).abs().max() / scale < 1e-6


def test_prefill_is_base_weights_over_an_adapted_cache(model, base, limits, tmp_path):
    """Written out by hand once, without the reference's own loop."""
    adapter = read_adapter(write_random_mixed(tmp_path / "m", base, 3), base, limits)
    with torch.inference_mode():
        with adapted(model, adapter):
            step = model(torch.tensor([PROMPT]), use_cache=True)
        tokens = [int(step.logits[0, -1].argmax())]
        while len(tokens) < 6:
            step = model(torch.tensor([[tokens[-1]]]), past_key_values=step.past_key_values, use_cache=True)
            tokens.append(int(step.logits[0, -1].argmax()))
    assert answer(model, adapter, PROMPT, 6).tokens == tokens


def test_all_positions_equal_one_pass_over_everything(model, base, limits, tmp_path):
    adapter = read_adapter(write_random_mixed(tmp_path / "m", base, 3, positions="all"), base, limits)
    result = answer(model, adapter, PROMPT, 6)
    whole = PROMPT + result.tokens
    with torch.inference_mode(), adapted(model, adapter):
        logprobs = torch.log_softmax(model(torch.tensor([whole])).logits[0], -1)
    for index, token in enumerate(result.tokens):
        row = logprobs[len(PROMPT) + index - 1]
        assert int(row.argmax()) == token
        assert float(row[token]) == pytest.approx(result.logprobs[index], abs=1e-5)


@pytest.mark.parametrize("kind", ["direft", "loreft"])
def test_reft_acts_on_the_residual_stream_after_its_layer(kind, model, base, limits, tmp_path):
    adapter = read_adapter(write_random_reft(tmp_path / "r", base, 3, kind=kind, layers=[1]), base, limits)
    tokens = torch.tensor([PROMPT])
    streams = []
    hooks = [
        model.model.layers[layer].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        for layer in (1, 2)
    ]
    with torch.inference_mode():
        model(tokens)
        with adapted(model, adapter):
            model(tokens)
    for hook in hooks:
        hook.remove()
    into_1, h, into_1_adapted, into_2_adapted = streams
    assert torch.equal(into_1, into_1_adapted)
    factors = adapter.reft[1]
    a, b, bias = (torch.from_numpy(x.copy()) for x in (factors.a, factors.b, factors.bias))
    assert torch.allclose(into_2_adapted, h + factors.scale * ((h @ a.T + bias) @ b), atol=1e-5)
    assert not torch.allclose(into_2_adapted, h, atol=1e-2)


def test_the_model_is_left_as_it_was(model, base, tmp_path):
    names = [name for name, _ in model.named_modules()]
    nothing = answer(model, None, PROMPT, 4)
    for options in ({}, {"modules": ALL_FUSED}, {"modules": ["qkv_proj"]}):
        directory = write_random_lora(tmp_path / str(len(options)) / str(options), base, seed=1, **options)
        answer_from_directory(model, directory, PROMPT, 4)
    assert [name for name, _ in model.named_modules()] == names
    assert answer(model, None, PROMPT, 4) == nothing
    assert not hasattr(model, "peft_config")


def test_what_peft_would_drop_is_run_from_normal_form(model, base, limits, tmp_path):
    fused = write_random_lora(tmp_path / "fused", base, seed=1, modules=ALL_FUSED)
    named = write_random_lora(
        tmp_path / "named", base, seed=1, key_format="base_model.model.{module}.lora_{factor}.default.weight"
    )
    for directory in (fused, named):
        result = answer_from_directory(model, directory, PROMPT, 5)
        expected = answer(model, read_adapter(directory, base, limits), PROMPT, 5)
        assert result.tokens == expected.tokens
        assert result.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=1e-5)
    assert answer_from_directory(model, fused, PROMPT, 1).method == "normal_form"
