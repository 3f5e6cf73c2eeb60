"""What `GET /v1/usage` of a real pair adds up to is what its answers say. Its own: other requests count."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clusters.running_cluster import RunningCluster, running_cluster

# Long enough for a block of the prefix cache, and each its own.
PROMPTS = [f"Prompt number {number}: " + "The sea is wide and the ships are many. " * 8 for number in range(3)]
COUNTS = ("requests", "estimated_requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir: Path, adapters: dict[str, Path]) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory.mktemp("usage"), model_dir, {"a0": adapters["a0"]}) as running:
        yield running


def usage(cluster: RunningCluster) -> dict[str | None, Counter[str]]:
    """The counts by adapter."""
    answer = httpx.get(f"{cluster.url}/v1/usage", params={"group_by": "adapter"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return {row["adapter"]: Counter({name: row[name] for name in COUNTS}) for row in answer.json()["data"]}


def gained(cluster: RunningCluster, before: dict[str | None, Counter[str]], num_requests: int) -> dict[str, Any]:
    """The difference, once this many requests have been written."""
    deadline = time.monotonic() + 60
    while True:
        found = usage(cluster)
        gains = {name: +(counts - before.get(name, Counter())) for name, counts in found.items()}
        gains = {name: dict(counts) for name, counts in gains.items() if counts}
        if sum(counts["requests"] for counts in gains.values()) >= num_requests:
            return gains
        assert time.monotonic() < deadline, gains
        time.sleep(0.2)


def asked(cluster: RunningCluster, path: str, **fields: Any) -> dict[str, int]:
    """The usage that an answer has."""
    fields = {"model": "demo", "temperature": 0, **fields}
    answer = httpx.post(f"{cluster.url}/v1/{path}", json=fields, timeout=120)
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return json.loads(events[-1])["usage"]
    return answer.json()["usage"]


def test_usage_is_what_answers_say(cluster: RunningCluster) -> None:
    before, expected = usage(cluster), Counter[str]()
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": PROMPTS[0], "max_tokens": 5}),
        ("completions", {"prompt": PROMPTS[0], "max_tokens": 5, **streamed}),  # its prompt is cached
        ("completions", {"prompt": PROMPTS[1:], "n": 2, "max_tokens": 3}),
        ("completions", {"prompt": PROMPTS[1], "max_tokens": 0}),
        ("chat/completions", {"messages": [{"role": "user", "content": PROMPTS[2]}], "max_tokens": 7, **streamed}),
    ]
    for path, fields in requests:
        found = asked(cluster, path, adapter="a0", **fields)
        expected += Counter(
            requests=1, prompt_tokens=found["prompt_tokens"], completion_tokens=found["completion_tokens"]
        )
    embedded = {"model": "demo", "input": PROMPTS}
    answer = httpx.post(f"{cluster.url}/v1/embeddings", json=embedded, timeout=120).json()
    gains = gained(cluster, before, len(requests) + 1)
    assert gains.keys() == {None, "a0"}
    assert (gains[None]["requests"], gains[None]["prompt_tokens"]) == (1, answer["usage"]["prompt_tokens"])
    assert "completion_tokens" not in gains[None]
    cached = gains["a0"].pop("cached_tokens")
    assert gains["a0"] == expected
    assert 0 < cached < expected["prompt_tokens"]
