"""Prompts nearly as long as an engine's KV cache are answered or refused, and hold up nobody behind them.

SGLang's limits on lengths come from the cache's size and the model's context. Without Prelude's hooks some prompts pass
them that the scheduler never takes: with pages of 64 tokens the last 58 lengths that fit, and on a decode engine those
that leave less than what it reserves for each answer.
"""

import random

import httpx
from support.clusters.running_cluster import RunningCluster
from support.engines.parity import completion_body

POOL_TOKENS, PAGE_TOKENS = 1024, 64  # of the engine that is small
LENGTHS = (
    500, 520, 700, 800, 888, 892, 896, 900, 959, 960, 962, 1000, 1015, 1017, 1018, 1019, 1023, 1024, 1025, 1100, 1500,
)  # fmt: skip


def check_lengths(cluster: RunningCluster, adapter: str, other: str) -> None:
    answered = [length for length in LENGTHS if is_answered(cluster, length, adapter, 4)]
    assert answered == [length for length in LENGTHS if length <= max(answered)], "a longer prompt was answered"
    assert 800 <= max(answered) < POOL_TOKENS
    for length in answered[-2:]:  # each answer may be as long as there is room, and then ends
        assert is_answered(cluster, length, other, POOL_TOKENS)
    assert all(each[2] == 0 for each in cluster.loads().values()), "somebody still holds KV"


def is_answered(cluster: RunningCluster, length: int, adapter: str, max_tokens: int) -> bool:
    """Whether a prompt of that length is answered, not refused, and one behind it is answered either way."""
    generator = random.Random(length)
    prompt = [generator.randrange(10, 600) for _ in range(length)]
    with httpx.Client(base_url=cluster.url, timeout=100) as client:
        answer = client.post("/v1/completions", json=completion_body(adapter, prompt, max_tokens=max_tokens))
        assert answer.status_code in (200, 400), f"{length} tokens: {answer.status_code} {answer.text}"
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert f"The input ({length} tokens) is longer than the " in error["message"]
        behind = client.post(
            "/v1/completions", json=completion_body(adapter, [10 + length % 600] + 19 * [7], max_tokens=4)
        )
        assert behind.status_code == 200, f"behind one of {length} tokens: {behind.text}"
        return answer.status_code == 200
