"""The queue of prompts at a worker."""

from __future__ import annotations

from router.placement.scorers.scorer import Candidate, Choice


class QueueScorer:
    """The time to read all prompts at the worker, the batch in progress included, and this one."""

    name = "queue"

    def cost_s(self, candidate: Candidate, choice: Choice) -> float:
        load = candidate.load
        return (load.unread_tokens + choice.request.size.prompt_tokens) * load.s_per_token

    def least_s(self, choice: Choice) -> float:
        return 0.0
