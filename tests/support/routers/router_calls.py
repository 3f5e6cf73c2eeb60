"""Requests to the stand-in cluster's router, and a check of what it reports about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
from support.router_stand_ins import ClusterStandIn

TEXT = "Hello wide world"  # what stand-ins of engines answer
MESSAGES = [{"role": "user", "content": "Hi"}]


def client_of(cluster: ClusterStandIn) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def has_phase(phase: str) -> Callable[[tuple[int, Any]], bool]:
    """A check of an answer of /debug/requests: some sequence is in this phase."""
    return lambda answer: any(s["phase"] == phase for r in answer[1]["requests"] for s in r["sequences"])
