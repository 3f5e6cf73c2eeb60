"""`litellm`: completion, with its provider `openai`."""

import json

import litellm
from asked import ADAPTER, KEY, MAX_TOKENS, MESSAGES, MODEL, URL, Trip, Weather, tell

asked = {"model": f"openai/{ADAPTER}", "api_base": URL, "api_key": KEY, "messages": MESSAGES}
asked |= {"max_tokens": MAX_TOKENS, "temperature": 0, "num_retries": 0}
tool = {
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}],
    "tool_choice": "required",
}


def text():
    return litellm.completion(**asked).choices[0].message.content


def adapter_field():
    asked_so = {**asked, "model": f"openai/{MODEL}", "extra_body": {"adapter": ADAPTER}}
    return litellm.completion(**asked_so).choices[0].message.content


def stream():
    return [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]


def tools():
    message = litellm.completion(**asked, **tool).choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    after = litellm.completion(**{**asked, "messages": [*MESSAGES, message, result]}, tools=tool["tools"])
    found = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    return {**found, "after": after.choices[0].message.content}


def tools_stream():
    chunks = list(litellm.completion(**asked, **tool, stream=True))
    call = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def json_schema():
    return json.loads(litellm.completion(**asked, response_format=Trip).choices[0].message.content)


tell(text, adapter_field, stream, tools, tools_stream, json_schema)
