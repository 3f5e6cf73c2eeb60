"""The OpenAPI document says what the router does: its routes, its limits, its refusals, its errors.

The router's stand-in clusters and the tests with the official client hold every answer against it, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support.router_stand_ins import VOCABULARY, running_cluster
from support.routers.described_answers import Described

from cluster.config.limits import RequestLimits
from router.api.openapi import ADMIN_OPERATIONS, OPERATIONS, error_codes, operations_of
from router.errors import RequestError
from router.protocol.field_values import Limits
from router.protocol.fields import REFUSED
from router.protocol.request_schemas import SCHEMA_OF
from router.protocol.rules import limits_table
from router.protocol.validation import INT32_MAX, INTEGERS, Endpoint, validate

LIMITS = Limits(max_choices=8, vocabulary=100)
DESCRIBED = Described(LIMITS)
GOOD: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"model": "base", "messages": [{"role": "user", "content": "Hi"}]},
    Endpoint.COMPLETIONS: {"model": "base", "prompt": "Hi"},
    Endpoint.SCORE: {"model": "base", "query": "Hi", "items": ["a"], "label_token_ids": [1]},
    Endpoint.RESPONSES: {"model": "base", "input": "Hi"},
    Endpoint.EMBEDDINGS: {"model": "base", "input": "Hi"},
}


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    async def scenario() -> None:
        async with running_cluster(0, 0) as cluster:
            routes = cluster.server.config.app._app.routes  # type: ignore[union-attr]
            assert sorted(operations_of(routes)) == sorted(OPERATIONS)
            for _, path in set(ADMIN_OPERATIONS) - set(OPERATIONS):
                status, answer = await cluster.get(path)
                assert (status, answer["error"]["code"]) == (404, "unknown_path")
                assert "admin listener" in answer["error"]["message"]
                async with cluster.http.get(f"{cluster.admin_url}{path}") as answered:
                    assert answered.status == 200
            async with cluster.http.get(f"{cluster.admin_url}/v1/models") as answered:
                assert answered.status == 404
            status, answer = await cluster.get("/ready")
            assert (status, answer.keys()) == (503, {"ready", "reason"})
            status, found = await cluster.get("/openapi.json")
            assert status == 200
            assert found["paths"].keys() == DESCRIBED.document["paths"].keys()
            tokens = found["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]
            assert tokens["anyOf"][0]["items"]["maximum"] == VOCABULARY - 1

    asyncio.run(scenario())


def test_schemas_are_schemas_and_references_lead_somewhere() -> None:
    schemas = DESCRIBED.document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(json.dumps(DESCRIBED.document).split('"$ref": "')[1:])
    named = {each.partition('"')[0].removeprefix("#/components/schemas/") for each in references}
    assert named == schemas.keys()  # all of them, and none is left over


def test_the_page_has_the_table_of_fields() -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    assert page.split("<!-- table fields -->")[1].split("<!-- end -->")[0].strip() == limits_table()
    sizes = RequestLimits()
    named = {name for name in RequestLimits.model_fields if f"`limits.{name}`" in page}
    assert named == RequestLimits.model_fields.keys()
    for name, shown in re.findall(r"`limits\.(\w+)` \((\d+)(?: [KM]iB)?\)", page):
        value = getattr(sizes, name)
        assert int(shown) in (value, value / 1024, value / 1024**2), name


def test_error_codes_are_those_of_the_code() -> None:
    public = json.loads((Path(__file__).parents[1] / "public_names_0.1.0.json").read_text())
    codes = error_codes()
    assert {"invalid_field": [400], "not_offered": [404], "adapter_not_found": [404]}.items() <= codes.items()
    for code, known in public["errors"].items():
        # Workers have codes of their own for adapters, which the router passes on.
        assert known["http_status"] in codes[code] if code in codes else code.startswith("adapter_"), code


def is_admitted(endpoint: Endpoint, fields: dict[str, Any]) -> bool:
    try:
        validate(endpoint, json.dumps(fields).encode(), LIMITS)
    except RequestError:
        return False
    return True


def check_same_verdict(endpoint: Endpoint, **change: Any) -> None:
    fields = {**GOOD[endpoint], **change}
    errors = DESCRIBED.request_errors(SCHEMA_OF[endpoint], fields)
    assert is_admitted(endpoint, fields) is (not errors), f"{change}: {errors or 'the schema has nothing against it'}"


@pytest.mark.parametrize("endpoint", Endpoint)
def test_what_is_refused(endpoint: Endpoint) -> None:
    check_same_verdict(endpoint)
    for name in REFUSED:
        for value in ("x", 1, None):
            check_same_verdict(endpoint, **{name: value})
    for name in GOOD[endpoint]:
        check_same_verdict(endpoint, **{name: None})
        check_same_verdict(endpoint, **{name: 7})


@pytest.mark.parametrize("endpoint", Endpoint)
def test_any_field_may_be_null_unless_it_is_required(endpoint: Endpoint) -> None:
    for name in DESCRIBED.document["components"]["schemas"][SCHEMA_OF[endpoint]]["properties"]:
        check_same_verdict(endpoint, **{name: None})


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETIONS])
def test_limits_of_numbers(endpoint: Endpoint) -> None:
    ranges = {**INTEGERS, "n": (1, LIMITS.max_choices), "max_tokens": (1, INT32_MAX), "top_logprobs": (0, 100)}
    for name, (least, most) in ranges.items():
        for value in (least - 1, least, most, most + 1, "1", True, None):
            check_same_verdict(endpoint, **{name: value})
    for value in (-0.1, 0, 1.5, 100, 100.1, "hot"):
        check_same_verdict(endpoint, temperature=value)
    for bias in (-101, -100, 100, 100.5, "x"):
        check_same_verdict(endpoint, logit_bias={"5": bias})
    for ids in ([0, 99], [100], [-1], "x"):
        check_same_verdict(endpoint, stop_token_ids=ids)


PROMPTS = ("", "a", [], [1], [100], [[1], [2]], ["a"], [""], [[]], [1.5], [1, "a"])


FUNCTION = {"type": "function", "name": "f"}
RESPONSES: tuple[tuple[str, Any], ...] = (
    *(("input", value) for value in ([], [{"role": "user", "content": "a"}], [{"role": "tool", "content": "a"}], 7)),
    *(("store", value) for value in (False, True, None)), *(("background", value) for value in (False, True)),
    *(("max_output_tokens", value) for value in (0, 1, INT32_MAX + 1)), ("include", []), ("include", ["x"]),
    ("previous_response_id", "r"), ("truncation", "auto"), ("truncation", "disabled"), ("max_tokens", 1), ("n", 1),
    ("tools", [{"type": "web_search"}]), ("tools", [FUNCTION]), ("tool_choice", "none"),
    ("tool_choice", {"type": "function"}),
    ("text", {"format": {"type": "text"}}), ("text", {"format": {"type": "x"}}), ("text", {"verbosity": "loud"}),
    ("reasoning", {"effort": "low"}), ("reasoning", {"effort": "x"}), ("reasoning", {"summary": "auto"}),
    ("metadata", {"a": 1}), ("metadata", {"a": "b"}), ("stream_options", {}), ("temperature", 101), ("stream", 1),
)  # fmt: skip

NAMED = {"function": {"name": "f"}}
WITH_NULLS: tuple[dict[str, Any], ...] = (  # the same as nothing inside a field
    *(
        {"tools": [each]}
        for each in ({**NAMED, "type": None}, {**NAMED, "x": None}, {"function": None}, {"type": None})
    ),
    *({"tools": [{"function": {"name": "f", **each}}]} for each in ({"x": None}, {"name": None}, {"strict": None})),
    {"tools": [{**NAMED, "type": "function"}], "tool_choice": {**NAMED, "type": None}},
    *({"response_format": each} for each in ({"type": None}, {"type": "text", "json_schema": None, "x": None})),
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": None, "x": None}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": None, "schema": {}}}},
    *({"chat_template_kwargs": each} for each in ({"enable_thinking": None}, {"x": None})),
    *({"messages": [{"role": "user", **each}]} for each in ({"content": "a", "x": None}, {"content": None})),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": None}]}]},
    {"stream": True, "stream_options": {"include_usage": None, "x": None}},
    {"reasoning": {"effort": None, "x": None}},
    {"logit_bias": {"5": None}},
)
RESPONSES_WITH_NULLS: tuple[dict[str, Any], ...] = (
    *({"tools": [{**FUNCTION, **each}]} for each in ({"type": None}, {"name": None}, {"strict": None}, {"x": None})),
    *({"tools": [FUNCTION], "tool_choice": {**FUNCTION, **each}} for each in ({"type": None}, {"x": None})),
    *({"text": each} for each in ({"format": None}, {"format": {"type": None}}, {"x": None}, {"verbosity": None})),
    *({"reasoning": each} for each in ({"effort": None}, {"summary": None}, {"x": None})),
    {"metadata": {"a": None}},
    {"stream": True, "stream_options": {"include_obfuscation": None, "x": None}},
    *({"input": [{"role": "user", "content": "a", **each}]} for each in ({"type": None}, {"x": None})),
)


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        *[(Endpoint.COMPLETIONS, {"prompt": prompt}) for prompt in PROMPTS],
        *[(Endpoint.COMPLETIONS, {"logprobs": n}) for n in (-1, 0, 100, 101, True)],
        (Endpoint.COMPLETIONS, {"max_tokens": 0}),
        (Endpoint.COMPLETIONS, {"stream_options": {"include_usage": True}}),
        (Endpoint.COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True}}),
        (Endpoint.COMPLETIONS, {"stream": True, "stream_options": {"include_usage": None}}),
        (Endpoint.CHAT, {"max_tokens": 0}),
        (Endpoint.CHAT, {"stream": "yes"}),
        (Endpoint.CHAT, {"stream_options": {}}),
        (Endpoint.CHAT, {"stream": True, "stream_options": []}),
        (Endpoint.CHAT, {"unknown": {"a": 1}}),
        (Endpoint.CHAT, {"response_format": "json"}),
        *[(Endpoint.CHAT, fields) for fields in WITH_NULLS],
        *[(Endpoint.RESPONSES, fields) for fields in RESPONSES_WITH_NULLS],
        *[(Endpoint.CHAT, {"messages": [{"role": role}]}) for role in ("user", "Tool", "SYSTEM", "users", None)],
        (Endpoint.CHAT, {"messages": ["Hi"]}),
        (Endpoint.CHAT, {"messages": []}),
        (Endpoint.CHAT, {"adapter": ""}),
        *[(Endpoint.RESPONSES, {name: value}) for name, value in RESPONSES],
        (Endpoint.RESPONSES, {"tools": [FUNCTION], "tool_choice": FUNCTION}),
        *[(Endpoint.EMBEDDINGS, {"input": prompt}) for prompt in (*PROMPTS, ["a"] * 8, ["a"] * 9, [[1]] * 9)],
        *[(Endpoint.EMBEDDINGS, {"encoding_format": value}) for value in ("float", "base64", "int8", 1, None)],
        *[(Endpoint.EMBEDDINGS, {"dimensions": value}) for value in (8, None)],
        (Endpoint.EMBEDDINGS, {"stream": True}),
        (Endpoint.SCORE, {"unknown": 1}),
        (Endpoint.SCORE, {"stream": True}),
        (Endpoint.SCORE, {"query": [1], "items": [[2], []]}),
        (Endpoint.SCORE, {"items": ["a"] * 8}),
        (Endpoint.SCORE, {"items": ["a"] * 9}),
        (Endpoint.SCORE, {"items": []}),
        (Endpoint.SCORE, {"label_token_ids": []}),
        (Endpoint.SCORE, {"label_token_ids": [100]}),
        (Endpoint.SCORE, {"label_token_ids": [1] * 1001}),
        (Endpoint.SCORE, {"apply_softmax": 1}),
    ],
)  # fmt: skip
def test_the_schema_and_the_router_agree(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    check_same_verdict(endpoint, **fields)


@pytest.mark.parametrize(
    ("status", "media_type", "body"),
    [
        (200, "application/json", b'{"status": "dead"}'),
        (200, "application/json", b"{}"),
        (200, "text/html", b'{"status": "alive"}'),
        (500, "application/json", b'{"message": "no"}'),
    ],
)
def test_an_answer_that_is_not_as_described_is_noticed(status: int, media_type: str, body: bytes) -> None:
    DESCRIBED.check("GET", "/health", 200, "application/json", b'{"status": "alive"}')
    with pytest.raises(AssertionError):
        DESCRIBED.check("GET", "/health", status, media_type, body)


def test_a_request_that_the_document_forbids_is_noticed() -> None:
    answer = {"text": "a", "prompt": "a"}
    with pytest.raises(AssertionError, match="takes what the document does not"):
        DESCRIBED.check("POST", "/detokenize", 200, "application/json", json.dumps(answer).encode(), {"tokens": "x"})
