"""Merges several sequences into one answer, for `n` > 1 and for several prompts.

Choice i of the answer is sequence i (prompt x n + j). Values stay the engine's bytes.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from router.protocol.field_values import encoded
from router.protocol.request_body import Fields
from router.protocol.sse import DONE, Usage

_object = msgspec.json.Decoder(Fields)
_choices = msgspec.json.Decoder(list[Fields])
_BYTES_A_TURN = 256 * 1024  # of answers that are parsed between two turns of the event loop


def merged_usage(usages: dict[int, Usage], num_per_prompt: int) -> Usage:
    """The sum over all sequences, in which each prompt counts once, however many sequences continue it."""
    prompts = [usage for index, usage in usages.items() if index % num_per_prompt == 0]
    details: dict[str, int | None] = {}
    for usage in prompts:
        for name, value in (usage.prompt_tokens_details or {}).items():
            details[name] = (details.get(name) or 0) + (value or 0)
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens or 0 for usage in usages.values())
    reasoning_tokens = sum(usage.reasoning_tokens or 0 for usage in usages.values())
    return Usage(
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens=completion_tokens,
        prompt_tokens_details=details or None,
        reasoning_tokens=reasoning_tokens,
        completion_tokens_details={"reasoning_tokens": reasoning_tokens} if reasoning_tokens else None,
    )


async def merged_answer(answers: Sequence[bytes], *, answer_id: str, num_per_prompt: int) -> bytes:
    """One answer with a choice per sequence. `answers` are in the order of their sequences.

    The event loop has a turn after every `_BYTES_A_TURN`: many log-probabilities of many sequences are megabytes.
    """
    first: Fields = {}
    choices: list[Fields] = []
    usages: dict[int, Usage] = {}
    num_bytes = 0  # since the last turn
    for index, answer in enumerate(answers):
        if (num_bytes := num_bytes + len(answer)) > _BYTES_A_TURN:
            await asyncio.sleep(0)
            num_bytes = len(answer)
        parsed = _object.decode(answer)
        first = first or parsed
        choices += [{**choice, "index": encoded(index)} for choice in _choices.decode(parsed["choices"])]
        usages[index] = msgspec.json.decode(parsed["usage"], type=Usage)
    merged = {
        **first,
        "id": encoded(answer_id),
        "choices": encoded(choices),
        "usage": encoded(merged_usage(usages, num_per_prompt)),
    }
    return msgspec.json.encode(merged)


class ChoiceStreams:
    """Merges streams into one, with one id and creation time, an index per choice, one usage and one end."""

    def __init__(self, *, answer_id: str, num_per_prompt: int, includes_usage: bool) -> None:
        self._id = encoded(answer_id)
        self._num_per_prompt = num_per_prompt
        self._includes_usage = includes_usage
        self._created: msgspec.Raw | None = None
        self._usages: dict[int, Usage] = {}
        self._last: Fields = {}

    def events(self, index: int, events: bytes) -> bytes:
        """The merged stream's events for some events of sequence `index`; may be empty."""
        return b"".join(
            self._event(index, event.removeprefix(b"data:").strip()) for event in events.split(b"\n\n") if event.strip()
        )

    def end(self) -> bytes:
        """The last events of the merged stream, after all sequences have ended."""
        if not self._includes_usage:
            return DONE
        usage = merged_usage(self._usages, self._num_per_prompt)
        return _event({**self._last, "choices": msgspec.Raw(b"[]"), "usage": encoded(usage)}) + DONE

    def _event(self, index: int, data: bytes) -> bytes:
        if data == b"[DONE]":
            return b""
        chunk = _object.decode(data)
        self._created = self._created or chunk.get("created")
        chunk["id"] = self._id
        if self._created is not None:
            chunk["created"] = self._created
        choices = _choices.decode(chunk["choices"])
        usage = chunk.get("usage")
        if not choices and usage is not None and bytes(usage) != b"null":
            self._usages[index] = msgspec.json.decode(usage, type=Usage)
            self._last = chunk
            return b""
        for choice in choices:
            choice["index"] = encoded(index)
        chunk["choices"] = encoded(choices)
        return _event(chunk)


def _event(chunk: Fields) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
