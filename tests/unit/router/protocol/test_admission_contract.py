"""The admission contract: a field that is not on the list is refused by name, at every depth, and so is too much.

Each case of SMUGGLED and TOO_MUCH reached an engine before there was a contract; some stopped it for good.
"""

import json
from typing import Any

import pytest
from support.constants import with_constants
from support.routers.admission import LIMITS, USER, admit, chat, complete, of_schema, tool
from support.routers.random_bodies import Bodies

from cluster.config.limits import RequestLimits
from router.errors import InvalidBody, RequestError
from router.generation.engine_bodies import reader_body
from router.protocol.field_values import Limits
from router.protocol.fields import BOOKKEEPING
from router.protocol.validation import Endpoint, validate

DEEP = f'{{"a": {"[" * 1000}{"]" * 1000}}}'  # engines could read it, and not write it again
BAD_TEMPLATE = "{% for i in range(999999999) %}{% endfor %}"


def arrays(num: int) -> dict[str, Any]:
    """`num` required properties, arrays with a maximum and arrays with a minimum."""
    names = [f"p{n}" for n in range(num)]
    kinds = ({"type": "array", "items": {}, "maxItems": 3}, {"type": "array", "items": {}, "minItems": 2})
    return {"properties": {name: kinds[n % 2] for n, name in enumerate(names)}, "required": names}


# What the error names: the fields
SMUGGLED = {
    "chat_template": {"chat_template_kwargs": {"chat_template": BAD_TEMPLATE}},
    "tokenizer_kwargs": {"chat_template_kwargs": {"tokenizer_kwargs": {"truncation": True}}},
    "enable_thinking": {"chat_template_kwargs": {"enable_thinking": "x" * 65}},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": {"a": 1}}},
    "new_field": {"new_field": 1},
    "chat_templat\u0435": {"chat_templat\u0435": "x"},  # a Cyrillic letter
    "LORA_PATH": {"LORA_PATH": "x"},
    "lora_path ": {"lora_path ": "x"},
    "functions": {"functions": []},
    "prompt": {"prompt": "Hi"},
    "messages[1]": {"messages": [USER, {**USER, "lora_path": "x"}]},
    "messages[0]: content": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "rid": "x"}]}]},
    "image_url": {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "file:///etc/passwd"}]}]},
    "messages[0]": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "rid": "x"}}]}]},
    "tools": {"tools": [tool(lora_path="x")]},
    "parameters": {"tools": [tool(parameters="x")]},
    "tool_choice": {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f"}, "rid": "x"}},
    '"json_schema": {': {"response_format": {"type": "json_schema", "schema": {}}},  # SGLang's older form
    "response_format": {"response_format": {**of_schema({}), "schema": {}}},
    "use response_format": {"json_schema": "{}"},
    "response_format.json_schema": {"response_format": {"type": "json_schema"}},
    "min_p": {"min_p": "LoRA adapters are not loaded"},
    "logit_bias": {"logit_bias": {"\u0661": 1}},  # a digit of another script
    "stream_options": {"stream": True, "stream_options": {"include_usage": True, "rid": "x"}},
    "reasoning_effort": {"reasoning_effort": True},
    "reasoning": {"reasoning": {"effort": "high", "chat_template": "x"}},
    "ebnf": {"ebnf": 'root ::= s\ns ::= s s | [a-z]'},
    "regex": {"regex": "((([a-z]+)+)+)+b"},
    "structural_tag": {"response_format": {"type": "structural_tag"}},
    "stop must have no empty string": {"stop": ["", "."]},  # every answer begins with it
}  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLED)
def test_what_is_not_on_the_list_is_named(name: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**SMUGGLED[name])
    assert refused.value.http_status == 400
    assert not refused.value.retryable
    assert name in str(refused.value)


TOO_MUCH = {
    "messages has": {"messages": [{"role": "user", "content": "x" * (4096 * 16)}]},
    "more than 1024 messages": {"messages": [{"role": "user"}] * 1025},
    "1025 parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
    "513 tool calls": {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}] * 513}]},
    "tool_calls[0].function.arguments are nested": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": DEEP}}]}]
    },
    "129 tools": {"tools": [tool()] * 129},
    "tools have": {"tools": [tool(description="x" * 2**17)]},
    "stop has 33": {"stop": ["x"] * 33},
    "stop has 1025 bytes": {"stop": "x" * 1025},
    "stop is too long": {"stop": ["x"] * 30_000},
    "stop_token_ids": {"stop_token_ids": [1] * 129},
    "logit_bias": {"logit_bias": {str(n): 1 for n in range(1025)}},
    "input_ids has 4097": {"input_ids": [1] * 4097},
    "regex": {"regex": "x" * 1025},
    "n x prompts x bytes": {"n": 128, "messages": [{"role": "user", "content": "x" * 50_000}] , "user": "x"},
    "metadata": {"metadata": {"a": "x" * 20_000}},
    "response_format.json_schema.schema has": {"response_format": of_schema({"description": "x" * 2**15})},
    "not required": {"response_format": of_schema(
        {"type": "object", "properties": {f"p{n}": {} for n in range(65)}}
    )},
    "too large": {"response_format": of_schema(
        {"required": [f"p{n}" for n in range(17)], "properties": {f"p{n}": {"maxLength": 9} for n in range(17)}}
    )},
    "anyOf": {"response_format": of_schema({"anyOf": [{}] * 65})},
    "schema.pattern": {"response_format": of_schema({"type": "string", "pattern": "([a-z]+ ?)*"})},
    "parameters has": {"tools": [tool(parameters={"anyOf": [{}] * 65})], "tool_choice": "required"},
    "maxLength": {"response_format": of_schema({"type": "string", "maxLength": 10**9})},
    "minItems 257": {"response_format": of_schema({"type": "array", "minItems": 257})},
    "64 arrays with a maximum": {"response_format": of_schema({"type": "object", **arrays(65)})},
}  # fmt: skip


@pytest.mark.parametrize("words", TOO_MUCH)
def test_what_is_too_much_is_refused_with_the_limit(words: str) -> None:
    limits = Limits(128, 100_000, 4096, with_constants(RequestLimits, choice_bytes=4 * 1024**2))
    with pytest.raises(RequestError) as refused:
        chat(limits, **TOO_MUCH[words])
    assert refused.value.http_status == 400
    assert words in str(refused.value)


def test_bounds_are_by_configuration() -> None:
    fields = {"stop": ["x"] * 40, "chat_template_kwargs": {"persona": "x"}}
    for name, value in fields.items():
        with pytest.raises(RequestError, match=name):
            chat(**{name: value})
    limits = Limits(128, 1000, 4096, with_constants(RequestLimits, stops=64, template_kwargs=("persona",)))
    chat(limits, **fields)
    for name in ("chat_template", "tools", "tokenize"):
        with pytest.raises(ValueError, match=name):
            RequestLimits(template_kwargs=(name,))


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "\0"},
        {"response_format": of_schema({"type": "string", "pattern": "\0"})},
        {"response_format": of_schema({"prefixItems": [{"type": "string", "pattern": "\0"}]})},
        {"tools": [tool(strict=True, parameters={"type": "string", "pattern": "\0"})]},
        {"tools": [tool(parameters={"type": "string", "pattern": "\0"})], "tool_choice": "required"},
    ],
)  # fmt: skip
def test_a_nul_in_a_grammar_is_refused(fields: dict[str, Any]) -> None:
    """xgrammar ends its process at a regular expression that begins with one: an engine's scheduler."""
    with pytest.raises(RequestError, match="NUL") as refused:
        chat(**fields)
    assert refused.value.http_status == 400


def test_a_prompt_has_no_more_than_the_context() -> None:
    complete(prompt="x" * (4096 * 16 - 2))
    complete(prompt=[[1] * 4096, [2] * 4096])
    for prompt in ("x" * (4096 * 16), [1] * 4097, ["x", "x" * (4096 * 16)], [[1] * 4097]):
        with pytest.raises(RequestError, match=r"prompt.*context length is 4096"):
            complete(prompt=prompt)
    with pytest.raises(RequestError, match="more than 8 prompts"):
        complete(prompt=["x"] * 5000)


def test_log_probabilities_of_whole_answers_are_bounded() -> None:
    """An engine writes them on the event loop that all its requests share, some 10 us for each."""
    limits = Limits(128, 1000, 100_000, with_constants(RequestLimits, answer_logprobs=21_000))
    asked = {"logprobs": True, "top_logprobs": 20}
    both = {"max_completion_tokens": 1000, "max_tokens": 9999}  # the first one counts
    for fields in ({"max_tokens": 1000}, {"max_tokens": 500, "n": 2}, both):
        assert chat(limits, **asked, **fields).most_tokens is None
    for fields in ({"max_tokens": 1001}, {"max_tokens": 501, "n": 2}, {"max_completion_tokens": 1001}):
        with pytest.raises(RequestError, match=r"at most 21000 are served in an answer that is not streamed"):
            chat(limits, **asked, **fields)
        assert chat(limits, **asked, **fields, stream=True).most_tokens is None
        chat(limits, **fields)
    with pytest.raises(RequestError, match=r"is 21084 log-probabilities.* max_tokens to at most 250"):
        complete(limits, prompt=["a", "b"], n=2, logprobs=20, max_tokens=251)
    complete(limits, logprobs=20)
    complete(Limits(128, 1000, 100_000), logprobs=20, max_tokens=1560)
    with pytest.raises(RequestError, match="at most 32768 are served"):
        complete(Limits(128, 1000, 100_000), logprobs=20, max_tokens=1561)
    # A model's context ends an answer, too; where nothing else does, the router has to.
    assert chat(Limits(128, 1000, 1000, limits.request), **asked, max_tokens=10**6).most_tokens is None
    assert chat(Limits(128, 1000, 1000, limits.request), **asked).most_tokens is None
    assert chat(limits, logprobs=True).most_tokens == 21_000
    found = chat(limits, **asked, n=3)
    assert [each.most_tokens for each in found.sequences()] == [333] * 3
    body = reader_body(next(found.sequences()), "base", "r", namespace="t", revision_id=None)
    assert isinstance(body, bytes)
    assert json.loads(body)["max_tokens"] == 333
    assert chat(limits, **asked, stream=True).most_tokens is None


def test_what_engines_do_once_per_choice_or_token_is_bounded() -> None:
    limits = Limits(128, 1000, 4096)
    biases = {str(token): 1 for token in range(1000)}
    complete(limits, logit_bias=biases, n=8)
    with pytest.raises(RequestError, match="logit_bias is 9000"):
        complete(limits, logit_bias=biases, n=9)
    complete(limits, prompt="x" * 30_000, echo=True, logprobs=1)
    complete(limits, prompt="x" * 60_000, logprobs=5)
    with pytest.raises(RequestError, match=r"1 \+ logprobs"):
        complete(limits, prompt="x" * 30_000, echo=True, logprobs=2)


# What the clients of docs/clients.md send, and what answers have that clients send back.
WORKING: tuple[dict[str, Any], ...] = (
    {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "u", "prompt_cache_key": "k",
     "safety_identifier": "s", "verbosity": "low", "modalities": ["text"]},
    {"max_completion_tokens": 8, "max_tokens": 8, "ignore_eos": True, "stop": None, "stream": True,
     "stream_options": {"include_usage": True, "continuous_usage_stats": True}},  # guidellm
    {"temperature": 0.0, "n": 1, "seed": 1, "top_p": 1.0, "stop": ["\n\n"], "logprobs": True, "top_logprobs": 5},
    {"tools": [tool(description="d", parameters={"type": "object", "properties": {"a": {}}}, strict=False)],
     "tool_choice": "auto", "parallel_tool_calls": False},
    {"messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "reasoning_content": None, "tool_calls": [
            {"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "f"}]},
    {"messages": [{"role": "assistant", "content": None, "parsed": None, "tool_calls": [  # as openai's parse() returns
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}]}]},
    {"response_format": {"type": "json_object"}},
    {"response_format": of_schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}})},
    {"response_format": of_schema({"type": "object", **arrays(64)})},
    {"response_format": of_schema({"type": "array", "minItems": 256, "maxItems": 10**6, "items": {"type": "boolean"}})},
    {"regex": r"\d{4}-\d{2}-\d{2}", "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
    {"reasoning": {"effort": "high", "enabled": True}, "reasoning_effort": 0.5},
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(WORKING)))
def test_what_clients_send_is_admitted(number: int) -> None:
    fields = WORKING[number]
    admitted = chat(**fields).fields
    for name, value in {"messages": [USER], **fields}.items():
        if name in BOOKKEEPING or value is None:
            assert name not in admitted  # nothing of it reaches an engine
        else:
            assert bytes(admitted[name]) == json.dumps(value).encode()  # byte for byte


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"b","prompt":[' + b"1," * 5_000_000 + b"1]}",
        b"{" + b",".join(b'"k%d":1' % n for n in range(40_000)) + b"}",
        b'{"model":"b",' + b'"n":1,' * 40_000 + b'"prompt":"x"}',
        b'{"model":"b","prompt":[' + b"[]," * 70_000 + b"[]]}",
    ],
    ids=["token ids", "unknown keys", "the same key", "lists"],
)
def test_a_large_body_of_small_values_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(InvalidBody, match="the most that is accepted"):
        validate(Endpoint.COMPLETIONS, body, LIMITS)


def test_a_large_body_of_text_with_brackets_and_quotes_is_admitted() -> None:
    limits = Limits(8, 1000, 131_072)
    text = '[{"a": "b"}, \\' * 50_000
    assert complete(limits, prompt=text).num_choices == 1


def test_random_bodies_are_admitted_or_refused_and_nothing_else() -> None:
    bodies, verdicts = Bodies(seed=12), {True: 0, False: 0}
    for _ in range(1000):
        path, fields = bodies.request()
        endpoint = Endpoint.CHAT if path == "chat/completions" else Endpoint.COMPLETIONS
        try:
            admit(endpoint, **fields)
            verdicts[True] += 1
        except RequestError:
            verdicts[False] += 1
    assert min(verdicts.values()) > 200
