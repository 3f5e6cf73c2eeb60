"""`openai`, as its README says: chats, its helpers for pydantic, and responses."""

import json

from asked import ADAPTER, KEY, MAX_TOKENS, MESSAGES, MODEL, PROMPT, URL, Trip, Weather, tell
from openai import OpenAI, pydantic_function_tool

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
asked = {"model": ADAPTER, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
tool = {"tools": [pydantic_function_tool(Weather, name="get_weather")], "tool_choice": "required"}


def text():
    return client.chat.completions.create(**asked).choices[0].message.content


def adapter_field():
    asked_so = {**asked, "model": MODEL, "extra_body": {"adapter": ADAPTER}}
    return client.chat.completions.create(**asked_so).choices[0].message.content


def stream():
    chunks = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


def tools():
    message = client.chat.completions.parse(**asked, **tool).choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    after = client.chat.completions.create(**{**asked, "messages": [*MESSAGES, message, result]}, tools=tool["tools"])
    arguments = call.function.parsed_arguments.model_dump()
    return {"name": call.function.name, "arguments": arguments, "after": after.choices[0].message.content}


def tools_stream():
    with client.chat.completions.stream(**asked, **tool) as events:
        call = events.get_final_completion().choices[0].message.tool_calls[0]
    return {"name": call.function.name, "arguments": json.loads(call.function.arguments)}


def json_schema():
    return client.chat.completions.parse(**asked, response_format=Trip).choices[0].message.parsed.model_dump()


def responses():
    return client.responses.create(model=ADAPTER, input=PROMPT, temperature=0, max_output_tokens=MAX_TOKENS).output_text


def responses_stream():
    fields = {"model": ADAPTER, "input": PROMPT, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    with client.responses.stream(**fields) as events:
        return [event.delta for event in events if event.type == "response.output_text.delta"]


def responses_json_schema():
    fields = {"model": ADAPTER, "input": PROMPT, "temperature": 0, "max_output_tokens": MAX_TOKENS}
    return client.responses.parse(**fields, text_format=Trip).output_parsed.model_dump()


tell(text, adapter_field, stream, tools, tools_stream, json_schema, responses, responses_stream, responses_json_schema)
