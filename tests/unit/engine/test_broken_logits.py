"""Logits without a probability end no engine, by SGLang's own sampler with the environment that engines get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.engines.own_process import printed_by

from cluster.agent.engine_spec import engine_spec
from cluster.config.schema import ClusterConfig
from engine.arguments import environment

SANITIZES = "SGLANG_SANITIZE_NAN_LOGITS"
CONFIG = ClusterConfig.model_validate({
    "model": {"path": "/m", "name": "demo", "dtype": "float32"},
    "engine": {"device": "cpu", "max_total_tokens": 4096},
    "workers": {
        "p": {"role": "prefill", "engine_port": 1, "bootstrap_port": 2},
        "d": {"role": "decode", "engine_port": 3},
    },
})  # fmt: skip
_CODE = """
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

factors = torch.full((8, 64), 1e38), torch.randn(100, 8) * 1e3  # finite, as an adapter's must be
adapted = torch.randn(64) @ factors[0].T @ factors[1].T
penalised, no_token = torch.randn(100), torch.full((100,), -torch.inf)  # min_tokens, and a grammar that has ended
apply_scaling_penalties(penalised, torch.full((100,), 1e-300))
sound = torch.zeros(100)
sound[7] = 1e4
sampler = object.__new__(Sampler)
torch.nn.Module.__init__(sampler)
sampler.rl_on_policy_target = None
sampler.use_ascend_backend = sampler.use_log_softmax_logprob = sampler.enable_deterministic = False
sampler._sync_token_ids_across_tp = lambda ids, info: None
result = {}
for name, broken in {"adapter": adapted, "penalty": penalised, "no token": no_token}.items():
    info = SimpleNamespace(
        has_custom_logit_processor=False, sampling_mask_batch_indices=None, sampling_seed=None,
        sampling_support_logprobs_capture_indices=None, is_all_greedy=False,
        need_top_p_sampling=False, need_top_k_sampling=False, need_min_p_sampling=False, temperatures=torch.ones(2, 1),
    )
    logits = torch.stack([sound, broken])
    try:
        result[name] = sampler(SimpleNamespace(next_token_logits=logits), info, False, [], [], None).tolist()
    except RuntimeError as error:
        result[name] = str(error)
print(json.dumps(result))
"""


@pytest.mark.slow
def test_logits_without_a_probability_end_no_engine() -> None:
    ours, decode = (environment(engine_spec(CONFIG, worker, Path("/scratch")), dict(os.environ)) for worker in "pd")
    assert ours[SANITIZES] == decode[SANITIZES]
    results, _ = printed_by(_CODE, **{SANITIZES: ours[SANITIZES]})
    assert list(results) == ["adapter", "penalty", "no token"]
    for broken, tokens in results.items():
        assert isinstance(tokens, list), (broken, tokens)
        assert tokens[0] == 7  # the other request of the batch gets its own token
        assert 0 <= tokens[1] < 100
