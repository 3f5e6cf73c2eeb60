"""KV memory of unified workers: when it is full, prompts wait until answers in progress end."""

from __future__ import annotations

from router.placement.scorers.scorer import Candidate, Choice

_FULL_S = 1.0  # per KV memory's worth of tokens that do not fit


class FreeKvScorer:
    """0 if the sequence fits, and for prefill workers: their decode worker is chosen by KV memory (`choose_decode`)."""

    name = "room"

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        load = candidate.load
        if candidate.worker.role != "unified" or not load.max_kv_tokens:
            return 0.0
        missing = load.used_kv_tokens + choice.request.size.kv_tokens - load.max_kv_tokens
        return max(0, missing) / load.max_kv_tokens * _FULL_S

    def least_s(self, choice: Choice) -> float:
        return 0.0
