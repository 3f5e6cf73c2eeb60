"""`/v1/score`: how likely each of some tokens is after a prompt. Requests, engine fields, and answers.

Same fields and results as SGLang's endpoint, which takes no adapter and runs on no prefill engine: engines are asked
through `/generate`, once per item, for the log-probabilities of the labels as the first generated token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import BrokenAnswer, InvalidField
from router.protocol.choices import Usage
from router.protocol.field_values import Limits, boolean, check_token_ids, decoded, shown
from router.protocol.fields import ADAPTER, SCORE
from router.protocol.request_body import Fields

MAX_LABELS = 1000


@dataclass(frozen=True, slots=True)
class Labels:
    """The tokens whose probabilities are wanted."""

    token_ids: tuple[int, ...]
    apply_softmax: bool  # over the labels, instead of probabilities over the whole vocabulary

    @classmethod
    def of(cls, fields: Fields, limits: Limits) -> Labels:
        """Raises InvalidField."""
        ids = decoded(fields, "label_token_ids", list[int], "a list of token ids")
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
        return {name: _raw(value) for name, value in asked.items()}

    def scores(self, logprobs: dict[int, float]) -> list[float]:
        """[num_labels], from the log-probability of each label."""
        values = [logprobs[token_id] for token_id in self.token_ids]
        if not self.apply_softmax:
            return [math.exp(value) for value in values]
        highest = max(values)
        if highest == -math.inf:  # none of them is possible at all
            return [1 / len(values)] * len(values)
        weights = [math.exp(value - highest) for value in values]
        return [weight / sum(weights) for weight in weights]


def score_prompts(fields: Fields, limits: Limits) -> tuple[msgspec.Raw, ...]:
    """One prompt for each item: query and item, or item and query. Raises InvalidField."""
    for name in fields:
        if name not in SCORE and name not in ("model", ADAPTER):
            raise InvalidField(
                f"{name} is not a field of this request; it takes {', '.join(sorted(SCORE))}", param=name
            )
    item_first = boolean(fields, "item_first")
    is_text = bytes(fields.get("query", b'""'))[:1] == b'"'
    query = decoded(fields, "query", str if is_text else list[int], "a string or a list of token ids")
    if query is None:
        raise InvalidField("query is required: a string or a list of token ids", param="query")
    if not is_text:
        check_token_ids("query", query, limits)
    prompts = []
    for item in _items(fields, is_text):
        prompt = item + query if item_first else query + item
        if not prompt:
            raise InvalidField("items: an item and query must not both be empty", param="items")
        if not is_text:
            check_token_ids("items", item, limits)
        prompts.append(_raw(prompt))
    if len(prompts) > limits.max_choices:
        raise InvalidField(f"{len(prompts)} items; at most {limits.max_choices} are scored per request", param="items")
    return tuple(prompts)


def _items(fields: Fields, is_text: bool) -> Iterator[Any]:
    as_text = "a string or a list of strings, as query is a string"
    expected = as_text if is_text else "a list of lists of token ids, as query is a list"
    raw = fields.get("items")
    if raw is None:
        raise InvalidField(f"items is required: {expected}", param="items")
    if is_text and bytes(raw)[:1] == b'"':
        yield decoded(fields, "items", str, expected)
        return
    items = decoded(fields, "items", list[str] if is_text else list[list[int]], expected)
    if not items:
        raise InvalidField(f"items must not be empty (found {shown(raw)})", param="items")
    yield from items


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int
    output_token_ids_logprobs: list[list[tuple[float | None, int, Any]]]  # [1][num_labels]: (log-probability, id, text)


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo


_generated = msgspec.json.Decoder(_Generated)


def check_generated(answer: bytes, worker: str) -> None:
    """Raises BrokenAnswer if an engine's answer has no log-probabilities, as that of an aborted request."""
    try:
        if _generated.decode(answer).meta_info.output_token_ids_logprobs:
            return
    except msgspec.MsgspecError:
        pass
    raise BrokenAnswer(f"worker {worker} gave no log-probabilities", worker=worker)


def score_answer(answers: Sequence[bytes], labels: Labels, *, answer_id: str, model: str) -> bytes:
    """One answer from those of engines, in the order of the items. All have passed `check_generated`."""
    scores, prompt_tokens = [], 0
    for answer in answers:
        found = _generated.decode(answer).meta_info
        prompt_tokens += found.prompt_tokens
        logprobs = {id_: -math.inf if value is None else value for value, id_, _ in found.output_token_ids_logprobs[0]}
        scores.append(labels.scores(logprobs))
    return msgspec.json.encode({
        "id": answer_id,
        "object": "scoring",
        "created": int(time.time()),
        "model": model,
        "scores": scores,
        "usage": Usage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens),
    })  # fmt: skip


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
