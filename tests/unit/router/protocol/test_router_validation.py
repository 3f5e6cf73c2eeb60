"""Admission: what is let in, what is refused and how it is said, and that values stay the client's bytes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers.admission import LIMITS, admit, chat, chat_sent, complete, sent
from support.routers.engine_fields import ENGINE_INTERNAL

from cluster.config.limits import RequestLimits
from router.errors import InvalidBody, InvalidField
from router.protocol.request_body import MAX_NESTING, nesting, split
from router.protocol.rules import INT32_MAX, INTEGERS, NUMBERS, RULES, TEXTS
from router.protocol.validation import Endpoint, validate


def test_the_page_has_a_row_for_each_field_with_its_range() -> None:
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
    assert [name for name in RequestLimits.model_fields if f"`limits.{name}`" not in page] == []
    for name, shown in re.findall(r"`limits\.(\w+)` \((\d+)(?: [KM]iB)?\)", page):
        value = getattr(RequestLimits(), name)
        assert int(shown) in (value, value / 1024, value / 1024**2), name


@pytest.mark.parametrize("name", sorted(ENGINE_INTERNAL | {"lora_id"}))
def test_fields_of_engines_are_refused(name: str) -> None:
    for endpoint in Endpoint:
        for value in (0, False, "", {}, [], "x"):
            with pytest.raises(InvalidField, match=name) as refused:
                admit(endpoint, **{name: value})
            assert refused.value.param == name
        assert admit(endpoint, **{name: None}).fields.keys() == admit(endpoint).fields.keys()


def test_an_escaped_name_is_the_same_name() -> None:
    body = b'{"model":"base","prompt":"Hi","lor\\u0061_path":"x"}'
    with pytest.raises(InvalidField, match="lora_path"):
        validate(Endpoint.COMPLETIONS, body, LIMITS)


def test_nulls_are_absent() -> None:
    assert set(chat(**dict.fromkeys(("stop", "tools", "functions", "metadata", "of_no_endpoint"))).fields) == {
        "messages"
    }


PROMPTS_THAT_ARE_NONE = (
    None, "", [], [[]], ["a", ""], ["a", [1]], [[1], "a"], [1, "a"], [True], [1.5], [1, 1000], [[1], [-5]],
    {"text": "a"}, 5, ["a"] * 9,
)  # fmt: skip
# Values that are refused, by the field that the error names.
WRONG: dict[Endpoint, dict[str, tuple[Any, ...]]] = {
    Endpoint.CHAT: {
        "model": (None, "", ["base"]),
        "adapter": (1, ""),
        "stream": ("yes", 1),
        **{name: (least - 1, most + 1, "1", True) for name, (least, most) in INTEGERS.items()},
        **{name: (lowest - 0.1, highest + 0.1, "1") for name, (lowest, highest, _) in NUMBERS.items()},
        "n": (0, 1.0, True, "2", 9, 10**30),
        "max_tokens": (0, "5", 2**31),
        "top_logprobs": (21,),
        "logit_bias": ({"5": 1e300}, [1]),
        "response_format": ("json",),
        "messages": ([], "Hi", ["Hi"], None, {"role": "user"}),
        "input_ids": ([1000], [-1]),
        "stop_token_ids": ([10**6], "x"),
        "stream_options": ({"include_usage": True}, []),
        "stop": ("", [""], [".", ""]),
    },
    Endpoint.COMPLETIONS: {
        "prompt": PROMPTS_THAT_ARE_NONE,
        "best_of": (2,),
        "logprobs": (-1, 10**6, True),
        "max_tokens": (-1, 0.0),
        "top_p": (0,),
        "seed": (1.5,),
        "stop": ("", ["", "."]),
    },
    Endpoint.EMBEDDINGS: {
        "model": (None,),
        "input": PROMPTS_THAT_ARE_NONE,
        "encoding_format": ("int8", 1),
        "dimensions": (8,),
        "prompt": ("a",),
        "stream": (True,),
    },
}


@pytest.mark.parametrize(
    ("endpoint", "name"), [(endpoint, name) for endpoint, names in WRONG.items() for name in names]
)
def test_wrong_values_are_named(endpoint: Endpoint, name: str) -> None:
    for value in WRONG[endpoint][name]:
        with pytest.raises(InvalidField) as wrong:
            admit(endpoint, **{name: value})
        assert wrong.value.param == name, value
        assert name in str(wrong.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 3, "n": 3}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"max_tokens": 0, "stream": True}, "stream"),
        ({"stream": True, "stream_options": []}, "stream_options"),
    ],
)
def test_values_that_exclude_each_other(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as wrong:
        complete(**fields)
    assert wrong.value.param == param


def test_the_ends_of_ranges_are_served() -> None:
    for name, ends in {**INTEGERS, "max_tokens": (1, INT32_MAX), "n": (1, 8)}.items():
        for value in ends:
            chat(**{name: value})
    for name, (lowest, highest, is_above) in NUMBERS.items():
        for number in (lowest + 0.01 if is_above else lowest, highest):
            complete(**{name: number})


def test_a_top_k_of_zero_is_none() -> None:
    """Engines refuse it, and other servers take it for all tokens."""
    assert [chat_sent(top_k=given)["top_k"] for given in (0, -1, 1)] == [-1, -1, 1]


def test_messages_do_not_quote_whole_prompts() -> None:
    with pytest.raises(InvalidField) as wrong:
        chat(messages="secret " * 100)
    assert len(str(wrong.value)) < 120


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "caf\u00e9"], ["Hi", "caf\u00e9"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([0], [[0]]),
        ([0, 0], [[0, 0]]),
        ([[0, 0], [1], [0]], [[0, 0], [1], [0]]),
    ],
)
def test_a_prompt_and_a_list_of_prompts(given: Any, prompts: list[Any]) -> None:
    """Engines take the completion of `[0]` for one of an empty prompt, and `[[0]]` for what it is."""
    for_completions = [each if isinstance(each, str) or any(each) else [each] for each in prompts]
    assert [each["prompt"] for each in sent(Endpoint.COMPLETIONS, prompt=given)] == for_completions
    embedded = sent(Endpoint.EMBEDDINGS, input=given)
    assert [each["text" if isinstance(prompts[0], str) else "input_ids"] for each in embedded] == prompts


def test_prompts_times_n() -> None:
    sequences = list(complete(prompt=["a", "b"], n=2, best_of=2, seed=7).sequences())
    assert [sequence.index for sequence in sequences] == [0, 1, 2, 3]
    assert [json.loads(bytes(sequence.fields["prompt"])) for sequence in sequences] == ["a", "a", "b", "b"]
    assert [json.loads(bytes(sequence.fields["seed"])) for sequence in sequences] == [7, 8, 7, 8]
    assert not any({"n", "best_of"} & set(sequence.fields) for sequence in sequences)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values, max_size=6), st.booleans())
def test_values_are_kept(fields: dict[str, Any], ascii_only: bool) -> None:
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
def test_not_a_json_object(body: bytes) -> None:
    with pytest.raises(InvalidBody):
        split(body)


def test_brackets_in_strings_are_no_nesting() -> None:
    body = json.dumps({"a": "[" * 1000 + '\\"{' * 500, "b": [[]] * 300}).encode()
    assert nesting(body) == 3
    assert set(split(body)) == {"a", "b"}


@given(json_values)
def test_nesting_is_exact_or_harmless(value: Any) -> None:
    def depth(inner: Any) -> int:
        if isinstance(inner, dict):
            return 1 + max(map(depth, inner.values()), default=0)
        return 1 + max(map(depth, inner), default=0) if isinstance(inner, list) else 0

    padded = [value, [[]] * MAX_NESTING]
    assert nesting(json.dumps(padded).encode()) == depth(padded)
