"""Choices: several sequences as one answer."""

import asyncio
import json
from typing import Any

from router.protocol.choices import ChoiceStreams, merged_answer
from router.protocol.completion_logprobs import with_prompt_logprobs, without_alternatives


def usage(prompt: int, completion: int, cached: int | None = None, reasoning: int = 1) -> dict[str, Any]:
    """As engines have it."""
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
        "reasoning_tokens": reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
    }


def test_answers() -> None:
    def answer(i: int) -> bytes:
        whole = {"id": f"r{i}", "created": i, "choices": [{"index": 0, "text": f"t{i}", "p": 0}], "metadata": {"v": i}}
        text = json.dumps({**whole, "usage": usage(5, 2, cached=3)})
        return text.replace('"p": 0', '"p":-0.10').encode()

    merged = asyncio.run(merged_answer([*map(answer, range(4))], answer_id="all", num_per_prompt=2))
    assert merged.startswith(b'{"id":"all"')
    assert merged.count(b'"p":-0.10') == 4  # numbers stay as the engine wrote them
    parsed = json.loads(merged)
    assert [(c["index"], c["text"]) for c in parsed["choices"]] == [(i, f"t{i}") for i in range(4)]
    assert parsed["usage"] == usage(10, 8, cached=6, reasoning=4)
    assert (parsed["created"], parsed["metadata"]) == (0, {"v": 0})


def test_streams() -> None:
    def event(index: int, **fields: Any) -> bytes:
        return b"data: " + json.dumps({"id": f"r{index}", "created": 8 + index, **fields}).encode() + b"\n\n"

    streams, out = ChoiceStreams(answer_id="all", num_per_prompt=2, includes_usage=True), b""
    for index in (1, 0):
        out += streams.events(index, event(index, choices=[{"index": 0, "text": f"t{index}"}], usage=None))
        assert (
            streams.events(index, event(index, choices=[], usage=usage(5, 2, reasoning=0)) + b"data: [DONE]\n\n") == b""
        )
    *lines, done = (out + streams.end()).removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("all", 9)}
    assert [(c["index"], c["text"]) for chunk in chunks for c in chunk["choices"]] == [(1, "t1"), (0, "t0")]
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], usage(5, 4, reasoning=0))


async def test_the_event_loop_has_turns_between_large_answers() -> None:
    turns = []

    async def count_turns() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    large = {"id": "one", "choices": [{"index": 0, "text": "a" * 100_000}], "usage": usage(1, 1)}
    counting = asyncio.create_task(count_turns())
    merged = await merged_answer([json.dumps(large).encode()] * 64, answer_id="all", num_per_prompt=64)
    counting.cancel()
    assert len(json.loads(merged)["choices"]) == 64
    assert len(turns) > 20  # in 6.4 MB


def logprobs(tokens: list[str], top: bool) -> dict[str, Any]:
    values = [None, *[-0.25] * (len(tokens) - 1)] if tokens[0] == "<s>" else [-0.25] * len(tokens)
    return {"token_logprobs": values, "tokens": tokens, "top_logprobs": [{"t": -0.25}] * len(tokens) if top else []}


def test_prompt_logprobs() -> None:
    prefill = {"id": "r", "choices": [{"index": 0, "logprobs": logprobs(["<s>", "a", "b"], True)}]}
    decode = {"id": "r", "choices": [{"index": 0, "text": "ab", "logprobs": logprobs(["b", "c"], True)}], "x": 1}
    merged = with_prompt_logprobs(json.dumps(decode).encode(), json.dumps(prefill).encode())
    for answer, top in ((merged, True), (without_alternatives(merged), False)):
        parsed = json.loads(answer)
        assert parsed["choices"][0]["logprobs"] == logprobs(["<s>", "a", "b", "c"], top)
        assert (parsed["x"], parsed["choices"][0]["text"]) == (1, "ab")
