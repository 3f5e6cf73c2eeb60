"""What a running cluster answers to the prompts of rows, beside what offline evaluation says of them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from training.data.columns import TextTurn, sft_row
from training.data.examples import load
from training.data.jsonl import read_rows
from training.data.tokens import Encoder, Turn
from training.runs.base import load_base
from training.runs.evaluation import evaluate_adapter, read_for, shown_text

_GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "return_token_ids": True}


@dataclass(frozen=True, slots=True)
class ComparedAnswers:
    """Of one adapter, or of the base model, in the order of the prompts; exact means that it is the row's answer."""

    served: tuple[tuple[str, bool], ...]  # (text, whether it is exact)
    offline: tuple[tuple[str, bool], ...]
    revisions: frozenset[str | None]  # that answered

    @property
    def exact_match(self) -> float:
        return sum(is_exact for _, is_exact in self.served) / len(self.served)


def compared_answers(
    url: str, model: Path, rows: Path, adapters: Sequence[tuple[str, Path] | None]
) -> list[ComparedAnswers]:
    """Of each adapter, by its name in the cluster and its directory; None: the base model."""
    base = load_base(model, "float32", "cpu")
    loaded = load([rows], Encoder(base.tokenizer, base.ends), sft_row, 2048)
    prompts = [
        each
        for row, example in zip(read_rows([rows]), loaded.examples, strict=True)
        for each in _prompts(sft_row(row.fields()), example.turns)
    ]
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(8) as threads:
        served_model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

        def ask(path: str, fields: dict[str, Any], turn: Turn, name: str | None) -> tuple[tuple[str, bool], str | None]:
            body = {**_GREEDY, **fields, "model": served_model, "max_tokens": len(turn.answers[0])}
            answer = client.post(path, json=body if name is None else {**body, "adapter": name})
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            assert choice["prompt_token_ids"] == list(turn.context)  # tokenized as for training
            given = choice["token_ids" if "token_ids" in choice else "response_token_ids"]  # of a completion or a chat
            is_exact = given == list(turn.answers[0])
            return (shown_text(base.tokenizer, given, base.ends), is_exact), answer.headers.get("x-prelude-revision")

        found = []
        for each in adapters:
            name, adapter = (None, None) if each is None else (each[0], read_for(base.model, each[1]))
            answers = list(threads.map(lambda prompt, name=name: ask(*prompt, name), prompts))
            turns = evaluate_adapter(base.model, base.tokenizer, loaded.examples, adapter).turns
            found.append(
                ComparedAnswers(
                    tuple(answer for answer, _ in answers),
                    tuple((turn.given, turn.is_exact) for turn in turns),
                    frozenset(revision for _, revision in answers),
                )
            )
    return found


def _prompts(columns: Any, turns: Sequence[Turn]) -> Iterator[tuple[str, dict[str, Any], Turn]]:
    """(path, fields, turn) of each of a row's requests."""
    if isinstance(columns, TextTurn):
        yield "/v1/completions", {"prompt": columns.prompt}, turns[0]
        return
    shared: dict[str, Any] = {} if columns.tools is None else {"tools": columns.tools}
    if columns.template_arguments:
        shared["chat_template_kwargs"] = columns.template_arguments
    for chat, turn in zip(columns.turns, turns, strict=True):
        yield "/v1/chat/completions", {"messages": list(chat.context), **shared}, turn
