"""`openai-agents`: agents over responses, which is its default, and over chats."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ADAPTER, KEY, MAX_TOKENS, MODEL, PROMPT, URL, Trip, Weather, tell
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces go to OpenAI
seen: list[dict] = []


def agent(kind=OpenAIResponsesModel, model: str = ADAPTER, output_type=None, tools=(), **settings) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS, **settings)
    model = kind(model, openai_client=client)
    return Agent(name="a", model=model, model_settings=settings, output_type=output_type, tools=list(tools))


@function_tool
def get_weather(weather: Weather) -> str:
    """The weather of a city."""
    seen.append(weather.model_dump())
    return "Sunny."


async def text():
    return (await Runner.run(agent(), PROMPT)).final_output


async def adapter_field():
    return (await Runner.run(agent(model=MODEL, extra_body={"adapter": ADAPTER}), PROMPT)).final_output


async def stream():
    events = Runner.run_streamed(agent(), PROMPT).stream_events()
    raw = [event.data async for event in events if event.type == "raw_response_event"]
    return [event.delta for event in raw if event.type == "response.output_text.delta"]


async def tools():
    seen.clear()
    after = (await Runner.run(agent(tools=[get_weather], tool_choice="required"), PROMPT)).final_output
    return {"name": "get_weather", "arguments": seen[0], "after": after}


async def json_schema():
    return (await Runner.run(agent(output_type=Trip), PROMPT)).final_output.model_dump()


async def chat():
    return (await Runner.run(agent(OpenAIChatCompletionsModel), PROMPT)).final_output


async def chat_tools():
    seen.clear()
    chatting = agent(OpenAIChatCompletionsModel, tools=[get_weather], tool_choice="required")
    after = (await Runner.run(chatting, PROMPT)).final_output
    return {"name": "get_weather", "arguments": seen[0], "after": after}


tell(text, adapter_field, stream, tools, json_schema, chat, chat_tools)
