"""`pydantic-ai`: an Agent over OpenAI's chats, its output by a tool and by JSON schema."""

from asked import ADAPTER, KEY, MAX_TOKENS, MODEL, PROMPT, URL, Trip, Weather, tell
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": MAX_TOKENS}
seen: list[dict] = []


def agent(kind=OpenAIChatModel, model: str = ADAPTER, output_type=str, settings=None) -> Agent:
    model = kind(model, provider=OpenAIProvider(base_url=URL, api_key=KEY), settings=SETTINGS)
    return Agent(model, output_type=output_type, model_settings=settings, retries=0)


def get_weather(weather: Weather) -> str:
    """The weather of a city."""
    seen.append(weather.model_dump())
    return "Sunny."


async def text():
    return (await agent().run(PROMPT)).output


async def adapter_field():
    return (await agent(model=MODEL, settings={"extra_body": {"adapter": ADAPTER}}).run(PROMPT)).output


async def stream():
    async with agent().run_stream(PROMPT) as answer:
        return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]


async def tools():
    seen.clear()
    asking = agent(settings=lambda _: {"tool_choice": "auto" if seen else "required"})
    asking.tool_plain(get_weather)
    after = (await asking.run(PROMPT)).output
    return {"name": "get_weather", "arguments": seen[0], "after": after}


async def json_by_tool():
    return (await agent(output_type=Trip).run(PROMPT)).output.model_dump()


async def json_by_tool_stream():
    async with agent(output_type=Trip).run_stream(PROMPT) as answer:
        return (await answer.get_output()).model_dump()


async def json_schema():
    return (await agent(output_type=NativeOutput(Trip)).run(PROMPT)).output.model_dump()


async def responses():
    return (await agent(OpenAIResponsesModel).run(PROMPT)).output


tell(text, adapter_field, stream, tools, json_by_tool, json_by_tool_stream, json_schema, responses)
