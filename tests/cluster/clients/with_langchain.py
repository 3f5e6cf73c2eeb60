"""`langchain-openai`: ChatOpenAI."""

from asked import ADAPTER, KEY, MAX_TOKENS, MODEL, PROMPT, URL, Trip, Weather, tell
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SETTINGS = {"base_url": URL, "api_key": KEY, "temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0}
llm = ChatOpenAI(model=ADAPTER, **SETTINGS)


@tool(args_schema=Weather)
def get_weather(city: str, celsius: bool, note: str) -> str:
    """The weather of a city."""
    return "Sunny."


def text():
    return llm.invoke(PROMPT).content


def adapter_field():
    return ChatOpenAI(model=MODEL, extra_body={"adapter": ADAPTER}, **SETTINGS).invoke(PROMPT).content


def stream():
    return [chunk.content for chunk in llm.stream(PROMPT)]


def tools():
    question = HumanMessage(PROMPT)
    message = llm.bind_tools([get_weather], tool_choice="required").invoke([question])
    call = message.tool_calls[0]
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    after = llm.bind_tools([get_weather]).invoke([question, message, result])
    return {"name": call["name"], "arguments": call["args"], "after": after.content}


def tools_stream():
    message = None
    for chunk in llm.bind_tools([get_weather], tool_choice="required").stream(PROMPT):
        message = chunk if message is None else message + chunk
    call = message.tool_calls[0]
    return {"name": call["name"], "arguments": call["args"]}


def json_schema():
    return llm.with_structured_output(Trip).invoke(PROMPT).model_dump()


def json_by_tool():
    return llm.with_structured_output(Trip, method="function_calling").invoke(PROMPT).model_dump()


def responses():
    return ChatOpenAI(model=ADAPTER, use_responses_api=True, **SETTINGS).invoke(PROMPT).text


tell(text, adapter_field, stream, tools, tools_stream, json_schema, json_by_tool, responses)
