"""The router answers what that of 0.1.0 answered (data/generate.py): every field, with its value or its type.

Today's answers may have more fields. What was changed on purpose is listed, with the answer of today.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import support.router_stand_ins as stand_ins
from support.router_stand_ins import ClusterStandIn, eventually, running_cluster
from support.routers.recorded_answers import ask, differences, mended

RECORD = json.loads((Path(__file__).parent / "data" / "answers-0.1.0.json").read_text())

# On the admin listener now: they tell everybody of all tenants. `/ready` is on both, in short for the public.
ADMIN_PAGES = ("/metrics", "/debug/requests", "/ready")
IN_SHORT = ("ready", "reason")


@dataclass(frozen=True)
class Change:
    """Requests that 0.1.0 served and that are refused today, each with an entry in the changelog."""

    why: str
    params: Mapping[str, str]  # the field that the error names, by the title of the exchange


CHANGES = (
    Change(
        "fields that no contract has are refused by name, because engines ran what some of them said",
        {
            "chat: new_field = 1": "new_field",
            "chat: new_field = null": "new_field",
            "completion: new_field = 1": "new_field",
            "completion: new_field = null": "new_field",
            'chat: chat_template_kwargs = {"other": 1}': "chat_template_kwargs",
        },
    ),
    Change(
        "fields of the other endpoint, which engines ignored",
        {
            "chat: best_of = 1": "best_of",
            "chat: best_of = null": "best_of",
            'chat: json_schema = "{\\"type\\": \\"object\\"}"': "json_schema",
            "chat: echo = true": "echo",
            'chat: prompt = "Hi"': "prompt",
            'completion: messages = [{"role": "user", "content": "Hi"}]': "messages",
            'completion: tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "objec': (
                "tools"
            ),
        },
    ),
    Change(
        "messages are text, which is all that the served models read",
        {
            'chat: messages = [{"role": "user", "content": '
            '[{"type": "image_url", "image_url": {"url": "data:i': "messages",
        },
    ),
    Change(
        "28 bytes of a grammar can stop an engine, so operators have to permit them",
        {'chat: ebnf = "root ::= \\"a\\""': "ebnf", 'completion: ebnf = "root ::= \\"a\\""': "ebnf"},
    ),
    Change(
        "stream_options without stream is an error, as it is at OpenAI",
        {
            'chat: stream_options = {"include_usage": true}': "stream_options",
            'completion: stream_options = {"include_usage": true}': "stream_options",
        },
    ),
)
TEXT_OFFSETS = [0, 0, 0, 5, 10]  # of "of the prompt"; 0.1.0 said -1 for each token
CHANGED = {title: param for change in CHANGES for title, param in change.params.items()}


async def replayed(group: Mapping[str, Any]) -> dict[str, list[str]]:
    """The differences of each exchange of a group, in their order."""
    config = dict(group.get("config", {}))
    if config.get("management"):
        config["adapter_root"] = stand_ins.TEMPLATE
    found = {}
    async with running_cluster(*group["workers"], **config) as cluster:
        if not group.get("ready", True):
            for worker in cluster.workers:
                await worker.change(ready=False)
            await cluster.is_ready(False)
        for title, exchange in group["exchanges"].items():
            found[title] = await differences_now(cluster, title, exchange)
            if "engines" in exchange:
                await mended(cluster)
    return {title: lines for title, lines in found.items() if lines}


async def differences_now(cluster: ClusterStandIn, title: str, exchange: Mapping[str, Any]) -> list[str]:
    expected = RECORD["answers"][exchange["answer"]]
    if title == "of the prompt":
        expected = copy.deepcopy(expected)
        expected["content"]["choices"][0]["logprobs"]["text_offset"] = TEXT_OFFSETS
    if title in CHANGED:
        error = {"type": "invalid_request_error", "param": CHANGED[title], "code": "invalid_field"}
        return differences(await ask(cluster, exchange, stand_ins), {"status": 400, "content": {"error": error}})
    if exchange["method"] != "GET" or "json" in exchange:
        return differences(await ask(cluster, exchange, stand_ins), expected)
    base_url = cluster.url
    if exchange["path"] in ADMIN_PAGES:
        base_url = cluster.admin_url
        of_public = await ask(cluster, exchange, stand_ins)
        if exchange["path"] == "/ready":
            short = {name: expected["content"][name] for name in IN_SHORT}
            assert not differences(of_public, {**expected, "content": short})
        else:
            assert of_public["status"] == 404
        headers = {name: value for name, value in expected["headers"].items() if name != "x-request-id"}  # of clients
        expected = {**expected, "headers": headers}

    async def differences_of_page() -> list[str]:
        return differences(await ask(cluster, exchange, stand_ins, base_url), expected)

    if "workers" not in expected["content"]:
        return await differences_of_page()
    try:  # what a worker has done is on the page once it has said so
        return await eventually(differences_of_page, lambda lines: not lines)
    except AssertionError:
        return await differences_of_page()


@pytest.mark.parametrize("name", RECORD["groups"])
def test_answers_are_those_of_0_1_0(name: str) -> None:
    assert not asyncio.run(replayed(RECORD["groups"][name]))


def test_each_change_is_of_a_request_that_was_served() -> None:
    exchanges = {title: each for group in RECORD["groups"].values() for title, each in group["exchanges"].items()}
    for title in CHANGED:
        assert RECORD["answers"][exchanges[title]["answer"]]["status"] == 200, title


def test_a_lost_or_changed_field_is_found() -> None:
    exchange = RECORD["groups"]["chats on a pair"]["exchanges"]["chat: stream with usage {'adapter': 'a0'}"]
    expected = RECORD["answers"][exchange["answer"]]

    def found(change: Any) -> list[str]:
        answer = copy.deepcopy(expected)
        answer["headers"]["x-request-id"] = answer["content"][0]["id"] = "an id"
        for event in answer["content"][:-1]:
            event["id"] = "an id"
        change(answer)
        return differences(answer, expected)

    assert not found(lambda answer: answer["content"][0].update(new="more"))
    assert found(lambda answer: answer.update(status=201)) == [".status is 201, was 200"]
    assert found(lambda answer: answer["headers"].pop("x-prelude-revision")) == [
        ".headers.x-prelude-revision is not there"
    ]
    assert found(lambda answer: answer["content"][0].pop("usage")) == [".content[0].usage is not there"]
    assert found(lambda answer: answer["content"][0].update(id=1)) == [".content[0].id is 1, was 'type only: str'"]
    assert found(lambda answer: answer["content"][0].update(created=True)) == [".content[0].created is True, was 1"]
    assert len(found(lambda answer: answer["content"].pop())) == 1
