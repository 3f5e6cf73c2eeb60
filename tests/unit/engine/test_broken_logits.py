"""Logits without a probability end no engine, by SGLang's own sampler with the environment that engines get."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.engines.running_engine import engine_spec

from engine.arguments import environment

SANITIZES = "SGLANG_SANITIZE_NAN_LOGITS"


def adapted() -> torch.Tensor:
    """By factors that are finite, as an adapter's must be."""
    return torch.randn(64) @ torch.full((8, 64), 1e38).T @ (torch.randn(100, 8) * 1e3).T


def penalised() -> torch.Tensor:
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    logits = torch.randn(100)
    apply_scaling_penalties(logits, torch.full((100,), 1e-300))
    return logits


def no_token() -> torch.Tensor:
    """With min_tokens, and a grammar that has ended."""
    return torch.full((100,), -torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize("make_broken", [adapted, penalised, no_token])
def test_logits_without_a_probability_end_no_engine(sglang, tmp_path: Path, monkeypatch, make_broken) -> None:
    from sglang.srt.layers.sampler import Sampler

    ours, decode = (environment(engine_spec(role, tmp_path, tmp_path), {}) for role in ("prefill", "decode"))
    assert ours[SANITIZES] == decode[SANITIZES]
    monkeypatch.setenv(SANITIZES, ours[SANITIZES])
    sampler = object.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = None
    sampler.use_ascend_backend = sampler.use_log_softmax_logprob = sampler.enable_deterministic = False
    sampler._sync_token_ids_across_tp = lambda ids, info: None
    info = SimpleNamespace(
        has_custom_logit_processor=False, sampling_mask_batch_indices=None, sampling_seed=None,
        sampling_support_logprobs_capture_indices=None, is_all_greedy=False,
        need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False, temperatures=torch.ones(2, 1),
    )  # fmt: skip
    sound = torch.zeros(100)
    sound[7] = 1e4
    logits = torch.stack([sound, make_broken()])
    first, second = sampler(SimpleNamespace(next_token_logits=logits), info, False, [], [], None).tolist()
    assert first == 7  # the other request of the batch gets its own token
    assert 0 <= second < 100
