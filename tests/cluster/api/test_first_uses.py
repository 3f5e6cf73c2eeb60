"""No field, kind of request or kind of adapter is slow the first time: engines compile and load nothing lazily.

An engine that did would make that request slow, and all others of its batch. So each is sent twice to a cluster that
nobody has used yet. With PRELUDE_TEST_DEVICE=cuda it runs on a GPU. Clusters of their own.
"""

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters.random_adapters import write_random_expert_lora, write_random_lora, write_random_reft
from support.clusters.running_cluster import ENGINE, running_cluster
from support.engines.model_families import make_family
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS

from adapters.model.base_model import BaseModel

PAIR = {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}}
UNIFIED = {"unified-0": {"role": "unified"}}

pytestmark = [pytest.mark.long, pytest.mark.alone]

PROMPT_TOKENS, LONG_PROMPT_TOKENS, ANSWER_TOKENS = 24, 300, 8
SLOW_S = 2.0  # a first use that takes no longer is fine, however short the second is
TIMES = 3.0  # else it may take this many times the second use

_COMPLETIONS, _CHATS = "completions", "chat/completions"
_SCHEMA = {
    "type": "object",
    "properties": {"key": {"enum": ["a", "b"]}},
    "required": ["key"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "find", "parameters": _SCHEMA}}
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "top_p": 0.9},
    {"temperature": 1, "top_k": 20},
    {"temperature": 1, "min_p": 0.1},
    {"temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
    {"temperature": 1, "seed": 7},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5, "min_tokens": 4},
    {"min_tokens": 4},
    {"logit_bias": {"20": 5, "21": -100}},
    {"stop": ["stop"]},
    {"stop_token_ids": [20]},
    {"logprobs": 3},
    {"echo": True, "logprobs": 3},
    {"return_token_ids": True},
    {"stream": True},
    {"n": 2, "temperature": 1},
    {"n": 3, "temperature": 1, "repetition_penalty": 1.1},
    {"n": 3, "temperature": 1, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "logit_bias": {"20": 5}, "logprobs": 2},
    {"regex": "[a-f]{3,5}"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "key", "schema": _SCHEMA}}},
)  # fmt: skip
_CHATTED: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"logprobs": True, "top_logprobs": 3},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "key", "schema": _SCHEMA}}},
    {"tools": [_TOOL]},
    {"tools": [_TOOL], "tool_choice": "required"},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}, "stream": True},
)


@dataclass(frozen=True, slots=True)
class Use:
    """One kind of request and how long it took, in seconds."""

    name: str
    first_s: float
    second_s: float

    @property
    def is_slow(self) -> bool:
        return self.first_s > max(SLOW_S, TIMES * self.second_s)


def measure_first_uses(url: str, adapters: Iterable[str]) -> list[Use]:
    """Send each kind of request twice, one request at a time. Raises AssertionError if one fails."""
    generator = random.Random(5)
    uses = []
    with httpx.Client(base_url=url, timeout=120) as client:
        for name, path, body in _requests(adapters):
            taken = []
            for _ in range(2):
                started_at = time.monotonic()
                answer = client.post(f"/v1/{path}", json=body | _prompt(path, body, generator))
                taken.append(time.monotonic() - started_at)
                assert answer.status_code == 200, f"{name}: {answer.text}"
            uses.append(Use(name, *taken))
    return uses


def _requests(adapters: Iterable[str]) -> Iterable[tuple[str, str, dict[str, Any]]]:
    base = {"model": "demo", "max_tokens": ANSWER_TOKENS}
    for fields in _SAMPLED:
        yield f"completion {fields}", _COMPLETIONS, base | fields
    yield "completion of two prompts", _COMPLETIONS, base | {"prompt": [[30, 31, 32], [40, 41]]}
    yield "completion of a long prompt", _COMPLETIONS, base | {"prompt": LONG_PROMPT_TOKENS}
    for fields in _CHATTED:
        yield f"chat {fields}", _CHATS, base | fields
    yield "response", "responses", {"model": "demo", "input": "hello", "max_output_tokens": ANSWER_TOKENS}
    yield "embedding", "embeddings", {"model": "demo", "input": "hello"}
    yield "tokenize", "tokenize", {"model": "demo", "prompt": "hello"}
    for adapter in adapters:
        yield f"adapter {adapter}", _COMPLETIONS, base | {"adapter": adapter}
        yield f"adapter {adapter}, repetition_penalty", _COMPLETIONS, base | {
            "adapter": adapter, "repetition_penalty": 1.1, "n": 2, "temperature": 1,
        }  # fmt: skip


def _prompt(path: str, body: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """A prompt that no request had before, so that both uses compute it."""
    if path == _CHATS:
        return {"messages": [{"role": "user", "content": f"hello {generator.randrange(10**6)}"}]}
    if path != _COMPLETIONS or isinstance(body.get("prompt"), list):
        return {}
    return {"prompt": [generator.randrange(10, 600) for _ in range(body.get("prompt", PROMPT_TOKENS))]}


def check(root: Path, model_dir: Path, adapters: dict[str, Path], **sections: Any) -> None:
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"
    model = {"path": str(model_dir), "name": "demo", "dtype": dtype, "tool_call_parser": "qwen25"}
    engine = {**ENGINE, "device": DEVICE, "extra_arguments": EXTRA_ARGUMENTS}
    with running_cluster(root, model_dir, adapters, model=model, engine=engine, **sections) as fresh:
        uses = measure_first_uses(fresh.url, adapters)
    for use in sorted(uses, key=lambda use: -use.first_s):
        print(f"{use.first_s:7.3f} s, then {use.second_s:.3f} s: {use.name}")
    assert not [use for use in uses if use.is_slow]


def test_a_pair(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    check(tmp_path, model_dir, adapters, workers=PAIR)


def test_a_unified_worker(tmp_path: Path, model_dir: Path, adapters: dict[str, Path]) -> None:
    base = BaseModel.read(model_dir)
    everywhere = {
        "everywhere": write_random_lora(tmp_path / "lora", base, 30, config={"prelude": {"positions": "all"}}),
        "everywhere-reft": write_random_reft(tmp_path / "reft", base, 31, positions="all"),
    }
    check(tmp_path, model_dir, {**adapters, **everywhere}, workers=UNIFIED)


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    make_family("mixtral", tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    adapters = {
        "attention": write_random_lora(tmp_path / "attention", base, 1, modules=base.slot_modules()),
        "experts": write_random_expert_lora(tmp_path / "experts", base, 3, rank=4, attention=["q_proj"]),
    }
    check(tmp_path, tmp_path / "model", adapters, workers=UNIFIED, adapter_limits={"max_expert_rank": 4})
