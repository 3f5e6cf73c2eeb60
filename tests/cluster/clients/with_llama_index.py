"""`llama-index-llms-openai-like`: OpenAILike."""

from asked import ADAPTER, KEY, MAX_TOKENS, MODEL, PROMPT, URL, Trip, Weather, tell
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

SETTINGS = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0}
SETTINGS |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
llm = OpenAILike(model=ADAPTER, **SETTINGS)
question = ChatMessage(role="user", content=PROMPT)


def get_weather(city: str, celsius: bool, note: str) -> str:
    """The weather of a city."""
    return "Sunny."


weather = FunctionTool.from_defaults(get_weather, fn_schema=Weather)


def text():
    return llm.chat([question]).message.content


def adapter_field():
    other = OpenAILike(model=MODEL, additional_kwargs={"extra_body": {"adapter": ADAPTER}}, **SETTINGS)
    return other.chat([question]).message.content


def stream():
    return [chunk.delta for chunk in llm.stream_chat([question])]


def tools():
    answer = llm.chat_with_tools([weather], user_msg=question, tool_required=True)
    call = llm.get_tool_calls_from_response(answer)[0]
    result = ChatMessage(role="tool", content="Sunny.", additional_kwargs={"tool_call_id": call.tool_id})
    after = llm.chat_with_tools([weather], chat_history=[question, answer.message, result])
    return {"name": call.tool_name, "arguments": call.tool_kwargs, "after": after.message.content or ""}


def tools_stream():
    *_, answer = llm.stream_chat_with_tools([weather], user_msg=question, tool_required=True)
    call = llm.get_tool_calls_from_response(answer)[0]
    return {"name": call.tool_name, "arguments": call.tool_kwargs}


def json_by_tool():
    return llm.structured_predict(Trip, PromptTemplate(PROMPT), llm_kwargs={"tool_required": True}).model_dump()


tell(text, adapter_field, stream, tools, tools_stream, json_by_tool)
