"""/v1/tokenize and /v1/detokenize."""

from typing import Any

import pytest
from support.router_stand_ins import MODEL, VOCABULARY, ClusterStandIn, running_cluster


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_there_and_back(prefix: str, cluster: ClusterStandIn) -> None:
    status, answer, _ = await cluster.post(f"{prefix}/tokenize", prompt="a b c", adapter="a0")
    assert (status, answer) == (200, {"tokens": [0, 1, 2], "count": 3, "max_model_len": 2048})
    _, answer, _ = await cluster.post(f"{prefix}/tokenize", prompt=["a b", "c"], add_special_tokens=False)
    assert answer["tokens"] == [[0, 1], [0]]
    messages = [{"role": "user", "content": "a b"}]
    _, answer, _ = await cluster.post(f"{prefix}/tokenize", messages=messages, prompt=None, model=None, tools=None)
    assert answer["tokens"] == [0, 1]
    for tokens, text in (([5, 6], "w5 w6"), ([[5], [6]], ["w5", "w6"])):
        status, answer, _ = await cluster.post(f"{prefix}/detokenize", tokens=tokens)
        assert (status, answer) == (200, {"text": text, "prompt": text})
    asked = [each for worker in cluster.workers for each in worker.engine.requests]
    assert asked[0] == {"prompt": "a b c", "model": MODEL}


WRONG: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    ("tokenize", {}, 400, "prompt"),
    ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
    *(("tokenize", {"prompt": value}, 400, "prompt") for value in ([], [1], ["a"] * 1025)),
    ("tokenize", {"messages": []}, 400, "messages"),
    ("tokenize", {"messages": [{"role": "pirate"}]}, 400, "messages[0].role"),
    ("tokenize", {"prompt": "a", "add_special_tokens": 1}, 400, "add_special_tokens"),
    ("tokenize", {"prompt": "a", "lora_path": "x"}, 400, "lora_path"),
    ("tokenize", {"prompt": "a", "whatever": 1}, 400, "whatever"),
    ("tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
    ("tokenize", {"prompt": "a", "model": 5}, 400, "model"),
    ("detokenize", {}, 400, "tokens"),
    *(
        ("detokenize", {"tokens": value}, 400, "tokens")
        for value in ("a", [VOCABULARY], [-1], [[1], [10**30]], [[1], 2], [1.5], [[1] * 1000] * 132, [[]] * 1025)
    ),
    ("detokenize", {"tokens": [1] * 131_073}, 400, "tokens"),  # the context has one less
)


async def test_wrong(cluster: ClusterStandIn) -> None:
    for path, fields, status, param in WRONG:
        found, answer, _ = await cluster.post(f"/v1/{path}", **fields)
        assert (found, answer["error"]["param"]) == (status, param), answer
    assert [worker.engine.bodies for worker in cluster.workers] == [[], []]


async def test_a_name_is_too_short_to_fill_memory_with_errors_that_quote_it(cluster: ClusterStandIn) -> None:
    for name in ("model", "adapter"):
        status, answer, _ = await cluster.post("/v1/tokenize", prompt="a", **{name: "x" * 1_000_000})
        error = answer["error"]
        assert (status, error["param"], error["message"]) == (400, name, f"{name} has over 1024 bytes")


@pytest.mark.slow
async def test_as_much_as_is_accepted(cluster: ClusterStandIn) -> None:
    """The answer is made in the threads for large bodies, and has the same text under both names."""
    status, answer, _ = await cluster.post("/v1/detokenize", tokens=[5] * 40_000)
    assert (status, answer["text"]) == (200, " ".join(["w5"] * 40_000))
    assert answer["prompt"] == answer["text"]
    status, answer, _ = await cluster.post("/v1/detokenize", tokens=[[5, 6]] * 1024)
    assert (status, answer["prompt"]) == (200, ["w5 w6"] * 1024)
    status, answer, _ = await cluster.post("/v1/tokenize", prompt=["a b"] * 1024)
    assert (status, len(answer["tokens"])) == (200, 1024)


@pytest.mark.slow
async def test_any_engine_answers_and_another_if_it_fails() -> None:
    async with running_cluster(0, 1) as cluster:
        assert (await cluster.post("/tokenize", prompt="a b"))[0] == 200
    async with running_cluster(0, 0) as cluster:
        status, answer, headers = await cluster.post("/tokenize", prompt="a b")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_worker_available", "1")
    async with running_cluster(0, 2) as cluster:
        await cluster.decode[0].engine.stop()
        status, answer, _ = await cluster.post("/tokenize", prompt="a b")
        assert (status, answer["count"]) == (200, 2)
        assert not any(load.num_sequences for load in cluster.fleet.loads.values())
