"""Many log-probabilities leave the event loop: the answer is what it was, made in small pieces in a thread.

`tests/engine/test_hooks.py` shows the same with SGLang's own classes.
"""

from __future__ import annotations

import asyncio
import threading
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field

from engine.hooks.bounds import log_probabilities
from engine.hooks.bounds.log_probabilities import MANY

TEXTS = ["a", "中", '"', "\\", "\n", "\U0001f600", ""]


class Token(BaseModel):
    token: str
    logprob: float
    top: list[dict[str, float]]


class OfChat(BaseModel):
    content: list[Token]


class OfCompletion(BaseModel):
    text_offset: list[int] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


class Answer(BaseModel):
    usage: dict[str, int] = Field(default_factory=dict)
    choices: list[OfChat | OfCompletion]
    text: str = '"content":[]'


class Serving:
    """Makes answers as SGLang does; notes how much it makes at a time, and whether on the event loop."""

    def __init__(self) -> None:
        self.made: list[tuple[int, bool]] = []

    def _note(self, amount: int) -> None:
        self.made.append((amount, threading.current_thread() is threading.main_thread()))

    def of_chat(self, handler: Any, item: dict[str, Any]) -> OfChat:
        meta = item["meta_info"]
        tokens, top = meta["output_token_logprobs"], meta.get("output_top_logprobs")
        self._note(len(tokens) + sum(len(each) for each in top or ()))
        return OfChat(
            content=[
                Token(token=text, logprob=value, top=[{each[2]: each[0]} for each in top[place]] if top else [])
                for place, (value, _, text) in enumerate(tokens)
            ]
        )

    def of_completion(self, **lists: Any) -> OfCompletion:
        made = OfCompletion()
        for name, values in lists.items():
            for each in values or ():
                if "top" in name:
                    made.top_logprobs.append(None if each is None else {text: value for value, _, text in each})
                else:
                    made.tokens.append(each[2])
                    made.text_offset.append(-1)
        self._note(sum(len(each or ()) for name, values in lists.items() for each in values or () if "top" in name))
        return made


def drawn(random: Random, num_tokens: int, num_alternatives: int) -> tuple[list[Any], list[Any]]:
    def one() -> tuple[float, int, str]:
        return random.choice([-1.5, float("-inf"), 0.0]), random.randrange(99), random.choice(TEXTS)

    return [one() for _ in range(num_tokens)], [[one() for _ in range(num_alternatives)] for _ in range(num_tokens)]


def answered(build: Any) -> tuple[Any, bytes]:
    """What the hook returns, and its JSON."""

    async def handle(*_arguments: Any) -> Any:
        return build()

    found = asyncio.run(log_probabilities.write_in_a_thread(handle, None, None, None, None))
    return found, found.body if hasattr(found, "body") else found.model_dump_json().encode()


@pytest.mark.slow
@pytest.mark.parametrize("num_alternatives", [0, 1, 20, 100])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, MANY, 3 * MANY + 1])
def test_an_answer_is_what_it_was_and_is_made_in_pieces(num_tokens: int, num_alternatives: int) -> None:
    random = Random(num_tokens + num_alternatives)
    choices = [drawn(random, num_tokens // 2, num_alternatives) for _ in range(2)]
    serving = Serving()

    def chats(make: Any) -> Answer:
        items = [
            {"meta_info": {"output_token_logprobs": tokens, "output_top_logprobs": top if num_alternatives else None}}
            for tokens, top in choices
        ]
        return Answer(choices=[make(item) for item in items])

    def completions(make: Any) -> Answer:
        given = [
            {
                "input_token_logprobs": tokens[:7],
                "output_token_logprobs": tokens[7:],
                "input_top_logprobs": [None, *top[:6]],
                "output_top_logprobs": top[7:],
            }
            for tokens, top in choices
        ]
        return Answer(choices=[make(**each) for each in given])

    for build, plain, hooked in (
        (
            chats,
            lambda item: serving.of_chat(None, item),
            lambda item: log_probabilities.leave_out_of_chats(serving.of_chat, None, item),
        ),
        (
            completions,
            serving.of_completion,
            lambda **lists: log_probabilities.leave_out_of_completions(serving.of_completion, **lists),
        ),
    ):
        expected = build(plain).model_dump_json().encode()
        assert build(hooked).model_dump_json().encode() == expected, "outside of the hook, as for streams"
        serving.made.clear()
        found, body = answered(lambda build=build, hooked=hooked: build(hooked))
        assert body == expected
        assert all(amount <= max(MANY, 1 + num_alternatives) for amount, _ in serving.made)
        is_left_out = num_tokens // 2 * (1 + num_alternatives) > MANY
        assert hasattr(found, "body") == is_left_out
        if is_left_out:  # only placeholders are made on the loop
            assert max(amount for amount, is_on_loop in serving.made if is_on_loop) <= 1
            assert not all(is_on_loop for _, is_on_loop in serving.made)


def test_one_request_does_not_leave_out_what_another_has() -> None:
    """The event loop serves many at a time; a stream makes its own beside an answer that is not streamed."""
    serving = Serving()
    tokens, _ = drawn(Random(1), 2 * MANY, 0)
    item = {"meta_info": {"output_token_logprobs": tokens}}

    def made() -> OfChat:
        return log_probabilities.leave_out_of_chats(serving.of_chat, None, item)

    async def both() -> list[Any]:
        beginning, streamed = asyncio.Event(), asyncio.Event()

        async def handle(*_arguments: Any) -> Any:
            beginning.set()
            await streamed.wait()
            return Answer(choices=[made()])

        answering = asyncio.create_task(log_probabilities.write_in_a_thread(handle, None, None, None, None))
        await beginning.wait()
        of_stream = made()
        streamed.set()
        return [of_stream, await answering]

    of_stream, answer = asyncio.run(both())
    assert len(of_stream.content) == 2 * MANY
    assert answer.body == Answer(choices=[of_stream]).model_dump_json().encode()


def test_an_error_stays_one() -> None:
    tokens, _ = drawn(Random(1), 2 * MANY, 0)
    error = SimpleNamespace(model_dump_json=lambda: "{}")

    def build() -> Any:
        log_probabilities.leave_out_of_chats(Serving().of_chat, None, {"meta_info": {"output_token_logprobs": tokens}})
        return error

    assert answered(build)[0] is error
