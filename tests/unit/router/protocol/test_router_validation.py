"""Admission: what is let in, what is refused and how it is said, and that values stay the client's bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers.engine_fields import ENGINE_INTERNAL

from cluster.config.limits import RequestLimits
from router.errors import InvalidBody, InvalidField
from router.protocol.field_values import Limits
from router.protocol.fields import CHAT_ONLY, COMPLETIONS_ONLY, NOT_OFFERED
from router.protocol.request_body import MAX_NESTING, nesting, split
from router.protocol.rules import INT32_MAX, INTEGERS, NUMBERS, RULES, TEXTS
from router.protocol.validation import FIELDS, Endpoint, validate

LIMITS = Limits(max_choices=8, vocabulary=100)
CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "base", "prompt": "Hi"}


def admit_chat(**fields: Any) -> Any:
    return validate(Endpoint.CHAT, json.dumps({**CHAT, **fields}).encode(), LIMITS)


def admit_completion(**fields: Any) -> Any:
    return validate(Endpoint.COMPLETIONS, json.dumps({**COMPLETION, **fields}).encode(), LIMITS)


class TestFields:
    def test_sets_are_disjoint(self) -> None:
        assert not RULES.keys() & ENGINE_INTERNAL
        assert not RULES.keys() & NOT_OFFERED.keys()
        assert FIELDS[Endpoint.CHAT] | FIELDS[Endpoint.COMPLETIONS] == RULES.keys()
        assert not CHAT_ONLY & COMPLETIONS_ONLY

    def test_the_page_has_a_row_for_each_with_its_range(self) -> None:
        page = (Path(__file__).parents[4] / "docs/api.md").read_text()
        table = page.partition("### What a schema enforces")[0].partition("## Fields and limits")[2]
        rows = [row.split(" | ") for row in table.splitlines() if row.startswith("| `")]
        told = {name: what for names, _, what in rows for name in re.findall(r"`(\w+)`", names)}
        assert told.keys() == RULES.keys()
        for name, (least, most) in INTEGERS.items():
            assert f"integer, {least} to {most}" in told[name]
        for name, (lowest, highest, _) in NUMBERS.items():
            assert f"{lowest:g} to {highest:g}" in told[name]
        for name, size in TEXTS.items():
            assert f"string of {size} bytes" in told[name]
        sizes = RequestLimits()
        assert {
            name for name in RequestLimits.model_fields if f"`limits.{name}`" in page
        } == RequestLimits.model_fields.keys()
        for name, shown in re.findall(r"`limits\.(\w+)` \((\d+)(?: [KM]iB)?\)", page):
            value = getattr(sizes, name)
            assert int(shown) in (value, value / 1024, value / 1024**2), name

    @pytest.mark.parametrize("name", sorted(ENGINE_INTERNAL | {"lora_id"}))
    def test_refused_on_both_endpoints(self, name: str) -> None:
        for admit_one in (admit_chat, admit_completion):
            for value in (0, False, "", {}, [], "x"):
                with pytest.raises(InvalidField, match=name) as refused:
                    admit_one(**{name: value})
                assert refused.value.param == name
            assert name not in admit_one(**{name: None}).fields

    def test_an_escaped_name_is_the_same_name(self) -> None:
        body = b'{"model":"base","prompt":"Hi","lor\\u0061_path":"x"}'
        with pytest.raises(InvalidField, match="lora_path"):
            validate(Endpoint.COMPLETIONS, body, LIMITS)

    def test_nulls_are_absent(self) -> None:
        nulls = dict.fromkeys(("stop", "tools", "functions", "metadata", "of_no_endpoint"))
        assert set(admit_chat(**nulls).fields) == {"messages"}


PROMPTS_THAT_ARE_NONE = (
    None, "", [], [[]], ["a", ""], ["a", [1]], [[1], "a"], [1, "a"], [True], [1.5], [1, 100], [[1], [-5]],
    {"text": "a"}, 5, ["a"] * 9,
)  # fmt: skip


class TestWrong:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"model": None}, "model"),
            ({"model": ""}, "model"),
            ({"model": ["base"]}, "model"),
            ({"adapter": 1}, "adapter"),
            ({"adapter": ""}, "adapter"),
            ({"stream": "yes"}, "stream"),
            ({"stream": 1}, "stream"),
            *[
                ({name: value}, name)
                for name, ends in INTEGERS.items()
                for value in (ends[0] - 1, ends[1] + 1, "1", True)
            ],
            *[({name: wrong}, name) for name, each in NUMBERS.items() for wrong in (each[0] - 0.1, each[1] + 0.1, "1")],
            ({"top_p": 0}, "top_p"),
            *[({"n": value}, "n") for value in (0, 1.0, True, "2", 9, 10**30)],
            *[({"max_tokens": value}, "max_tokens") for value in (0, "5", 2**31)],
            ({"seed": 1.5}, "seed"),
            ({"top_logprobs": 21}, "top_logprobs"),
            ({"logit_bias": {"5": 1e300}}, "logit_bias"),
            ({"logit_bias": [1]}, "logit_bias"),
            ({"response_format": "json"}, "response_format"),
            *[({"messages": value}, "messages") for value in ([], "Hi", ["Hi"], None, {"role": "user"})],
            *[({"input_ids": value}, "input_ids") for value in ([100], [-1])],
            ({"stop_token_ids": [10**6]}, "stop_token_ids"),
            ({"stop_token_ids": "x"}, "stop_token_ids"),
            ({"stream": True, "stream_options": []}, "stream_options"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": False, "stream_options": {}}, "stream_options"),
        ],
    )
    def test_chat(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(InvalidField) as wrong:
            admit_chat(**fields)
        assert wrong.value.param == param
        assert param in str(wrong.value)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            *[({"prompt": value}, "prompt") for value in PROMPTS_THAT_ARE_NONE],
            ({"prompt": ["a"] * 3, "n": 3}, "n"),
            ({"best_of": 2}, "best_of"),
            ({"n": 2, "best_of": 1}, "best_of"),
            *[({"logprobs": value}, "logprobs") for value in (-1, 10**6, True)],
            ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
            ({"max_tokens": 0, "stream": True}, "stream"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"max_tokens": 0.0}, "max_tokens"),
        ],
    )
    def test_completions(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(InvalidField) as wrong:
            admit_completion(**fields)
        assert wrong.value.param == param

    def test_the_ends_of_ranges_are_served(self) -> None:
        for name, (least, most) in {**INTEGERS, "max_tokens": (1, INT32_MAX), "n": (1, 8)}.items():
            for value in (least, most):
                admit_chat(**{name: value})
        for name, (lowest, highest, is_above) in NUMBERS.items():
            for number in (lowest + 0.01 if is_above else lowest, highest):
                admit_completion(**{name: number})

    def test_messages_do_not_quote_whole_prompts(self) -> None:
        with pytest.raises(InvalidField) as wrong:
            admit_chat(messages="secret " * 100)
        assert len(str(wrong.value)) < 120


class TestSequences:
    def test_one(self) -> None:
        body = b'{"model":"base:a0","adapter":"a0","prompt": "caf\\u00e9" ,"temperature":1.50, "user" : null}'
        validated = validate(Endpoint.COMPLETIONS, body, LIMITS)
        assert (validated.model, validated.adapter, validated.num_choices) == ("base:a0", "a0", 1)
        (sequence,) = validated.sequences()
        assert {name: bytes(value) for name, value in sequence.fields.items()} == {
            "prompt": b'"caf\\u00e9"',
            "temperature": b"1.50",
        }

    @pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [1, 2, 3], [[1, 2, 3]]])
    def test_one_prompt_has_many_forms(self, prompt: Any) -> None:
        (sequence,) = admit_completion(prompt=prompt).sequences()
        assert json.loads(bytes(sequence.fields["prompt"])) in ("Hi", [1, 2, 3])

    @pytest.mark.parametrize("prompt", [[0], [0, 0], [[0, 0], [1], [0]]])
    def test_a_prompt_of_nothing_but_token_0_is_the_only_one_of_a_list(self, prompt: Any) -> None:
        """Engines take `[0]` for an empty prompt, and `[[0]]` for what it is."""
        prompts = prompt if isinstance(prompt[0], list) else [prompt]
        sent = [json.loads(bytes(each.fields["prompt"])) for each in admit_completion(prompt=prompt).sequences()]
        assert sent == [each if any(each) else [each] for each in prompts]

    def test_prompts_times_n(self) -> None:
        sequences = list(admit_completion(prompt=["a", "b"], n=2, best_of=2, seed=7).sequences())
        assert [sequence.index for sequence in sequences] == [0, 1, 2, 3]
        assert [json.loads(bytes(sequence.fields["prompt"])) for sequence in sequences] == ["a", "a", "b", "b"]
        assert [json.loads(bytes(sequence.fields["seed"])) for sequence in sequences] == [7, 8, 7, 8]
        assert not any({"n", "best_of"} & set(sequence.fields) for sequence in sequences)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


class TestBody:
    @pytest.mark.slow
    @given(st.dictionaries(st.text(), json_values, max_size=6), st.booleans())
    def test_values_are_kept(self, fields: dict[str, Any], ascii_only: bool) -> None:
        body = json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        for name, value in split(body).items():
            assert bytes(value) == json.dumps(fields[name], ensure_ascii=ascii_only).encode()

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"{", b"null", b"[{}]", b'"x"', b'{"a":NaN}', b'{"a":Infinity}', b'{"a":01}', b'{"a":"\xff"}',
            b'{"a":"\\ud800"}', b'{"\\ud800":1}', b'{"a":"\n"}', b'{"a":1} {"b":2}', b"\xef\xbb\xbf{}",
            b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", b'{"a":' + b"[" * 200_000,
            b'{"a":' + b'{"a":' * 500 + b"1" + b"}" * 501,
        ],
    )  # fmt: skip
    def test_not_a_json_object(self, body: bytes) -> None:
        with pytest.raises(InvalidBody):
            split(body)

    def test_brackets_in_strings_are_no_nesting(self) -> None:
        body = json.dumps({"a": "[" * 1000 + '\\"{' * 500, "b": [[]] * 300}).encode()
        assert nesting(body) == 3
        assert set(split(body)) == {"a", "b"}

    @given(json_values)
    def test_nesting_is_exact_or_harmless(self, value: Any) -> None:
        def depth(inner: Any) -> int:
            if isinstance(inner, dict):
                return 1 + max(map(depth, inner.values()), default=0)
            return 1 + max(map(depth, inner), default=0) if isinstance(inner, list) else 0

        padded = [value, [[]] * MAX_NESTING]
        assert nesting(json.dumps(padded).encode()) == depth(padded)
