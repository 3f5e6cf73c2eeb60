"""`/v1/score`: the probability of each label token after a prompt. Requests, engine fields, and answers.

Same fields and results as SGLang's endpoint. That one takes no adapter and does not run on prefill engines, so the
router asks `/generate`, once per item, for the log-probabilities of the labels as the first generated token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import BrokenAnswer, InvalidField
from router.protocol.field_values import Limits, boolean, bounded_list, check_token_ids, decoded, encoded, shown
from router.protocol.request_body import Fields
from router.protocol.sse import Usage

MAX_LABELS = 1000


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int
    output_token_ids_logprobs: list[list[tuple[float | None, int, Any]]]  # [1][num_labels]: (log-probability, id, text)


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo


_generated = msgspec.json.Decoder(_Generated)


@dataclass(frozen=True, slots=True)
class Labels:
    """The tokens whose probabilities are wanted."""

    token_ids: tuple[int, ...]
    apply_softmax: bool  # over the labels, instead of probabilities over the whole vocabulary

    @classmethod
    def of(cls, fields: Fields, limits: Limits) -> Labels:
        """Raises InvalidField."""
        raw = fields.get("label_token_ids")
        is_short = raw is None or len(memoryview(raw)) <= 32 * MAX_LABELS  # before it is decoded
        ids = decoded(fields, "label_token_ids", list[int], "a list of token ids") if is_short else None
        if not ids or len(ids) > MAX_LABELS:
            found = len(ids) if ids else "none"
            raise InvalidField(
                f"label_token_ids must have 1 to {MAX_LABELS} ids (found {found})", param="label_token_ids"
            )
        check_token_ids("label_token_ids", ids, limits)
        return cls(tuple(ids), boolean(fields, "apply_softmax"))

    @property
    def engine_fields(self) -> Fields:
        """What an engine is asked, without the prompt."""
        asked = {
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": -1,
            "token_ids_logprob": self.token_ids,
            "stream": False,
        }
        return {name: encoded(value) for name, value in asked.items()}

    def parse(self, answer: bytes, worker: str) -> bytes:
        """The needed part of an engine's answer, which is all of it. Raises BrokenAnswer."""
        try:
            if _generated.decode(answer).meta_info.output_token_ids_logprobs:
                return answer
        except msgspec.MsgspecError:
            pass
        raise BrokenAnswer(f"worker {worker} gave no log-probabilities", worker=worker)  # as that of an aborted request

    def merge(self, parsed: Sequence[bytes], *, answer_id: str, model: str) -> bytes:
        """One answer from those of engines, in the order of the items."""
        scores, prompt_tokens = [], 0
        for answer in parsed:
            found = _generated.decode(answer).meta_info
            prompt_tokens += found.prompt_tokens
            values = found.output_token_ids_logprobs[0]
            scores.append(self.scores({id_: -math.inf if value is None else value for value, id_, _ in values}))
        return msgspec.json.encode({
            "id": answer_id,
            "object": "scoring",
            "created": int(time.time()),
            "model": model,
            "scores": scores,
            "usage": Usage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens),
        })  # fmt: skip

    def scores(self, logprobs: dict[int, float]) -> list[float]:
        """[num_labels], from the log-probability of each label."""
        values = [logprobs[token_id] for token_id in self.token_ids]
        if not self.apply_softmax:
            return [math.exp(value) for value in values]
        highest = max(values)
        if highest == -math.inf:  # none of them is possible at all
            return [1 / len(values)] * len(values)
        weights = [math.exp(value - highest) for value in values]
        total = sum(weights)
        return [weight / total for weight in weights]


def score_prompts(fields: Fields, limits: Limits) -> tuple[msgspec.Raw, ...]:
    """One prompt for each item: query and item, or item and query. Raises InvalidField."""
    item_first = boolean(fields, "item_first")
    raw_query = fields.get("query")
    if raw_query is None:
        raise InvalidField("query is required: a string or a list of token ids", param="query")
    limits.check_prompt_size("query", len(memoryview(raw_query)))
    is_text = memoryview(raw_query)[:1] == b'"'
    query = decoded(fields, "query", str if is_text else list[int], "a string or a list of token ids")
    if not is_text:
        check_token_ids("query", query, limits)
    raw_items = _items(fields, is_text, limits)
    total = sum(len(memoryview(item)) for item in raw_items) + len(raw_items) * len(memoryview(raw_query))
    if total > limits.request.choice_bytes:
        raise InvalidField(
            f"items x query is {total} bytes; at most {limits.request.choice_bytes} are served per request",
            param="items",
        )
    prompts = []
    for raw in raw_items:
        limits.check_prompt_size("items", len(memoryview(raw)))
        item = decoded({"items": raw}, "items", str if is_text else list[int], _expected_items(is_text))
        prompt = item + query if item_first else query + item
        if not prompt:
            raise InvalidField("items: an item and query must not both be empty", param="items")
        if not is_text:
            check_token_ids("items", item, limits)
        prompts.append(encoded(prompt))
    return tuple(prompts)


def _expected_items(is_text: bool) -> str:
    as_text = "a string or a list of strings, as query is a string"
    return as_text if is_text else "a list of lists of token ids, as query is a list"


def _items(fields: Fields, is_text: bool, limits: Limits) -> list[msgspec.Raw]:
    expected = _expected_items(is_text)
    raw = fields.get("items")
    if raw is None:
        raise InvalidField(f"items is required: {expected}", param="items")
    if is_text and memoryview(raw)[:1] == b'"':
        return [raw]
    try:
        items = bounded_list(raw, limits.max_choices)
    except msgspec.MsgspecError:
        raise InvalidField(f"items must be {expected} (found {shown(raw)})", param="items") from None
    if items is None:
        raise InvalidField(f"at most {limits.max_choices} items are scored per request", param="items")
    if not items:
        raise InvalidField(f"items must not be empty (found {shown(raw)})", param="items")
    return items
