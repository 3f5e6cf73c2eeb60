"""`instructor`: answers as pydantic objects, by a tool and by JSON schema."""

import instructor
from asked import ADAPTER, KEY, MAX_TOKENS, MESSAGES, MODEL, URL, Trip, tell
from openai import OpenAI

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
by_tool = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
by_schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
asked = {"model": ADAPTER, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0, "max_retries": 0}


def text():
    return by_tool.create(**asked, response_model=None).choices[0].message.content


def adapter_field():
    asked_so = {**asked, "model": MODEL, "extra_body": {"adapter": ADAPTER}}
    return by_tool.create(**asked_so, response_model=None).choices[0].message.content


def json_by_tool():
    return by_tool.create(**asked, response_model=Trip).model_dump()


def json_by_tool_partial():  # streamed, by a schema of its own
    *_, trip = by_tool.create_partial(**asked, response_model=Trip)
    return trip.model_dump()


def json_schema():
    return by_schema.create(**asked, response_model=Trip).model_dump()


tell(text, adapter_field, json_by_tool, json_by_tool_partial, json_schema)
