"""What SGLang makes of calls of tools that a limit cut, for `hooks_in_action.py`."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

CREATED, STOP = 5, 9
CALLS = (
    'I look.<tool_call>\n{"name":"find", "arguments":{"city": "Rome \\n\\"é", "days": [1, {"at": -2.5, "wet": true}]}}'
    '\n</tool_call>\n<tool_call>\n{"name":"find", "arguments":{"city": "Oslo"}}\n</tool_call>'
)


def observed() -> dict[str, list[object]]:
    """By hook: two answers that a limit cut, two that ended, one as a call could begin, and one that a stop cut."""
    ended, stopped = {"type": "stop", "matched": 7}, {"type": "stop", "matched": STOP}
    streamed = [streamed_of(CALLS[:length], {"type": "length"}) for length in range(len(CALLS) + 1)]
    whole = [streamed[CALLS.index("ome")], streamed[-1], streamed_of("1 <", ended), streamed_of(CALLS, ended)]
    return {"cut_calls_stay_open": [*whole, streamed_of(CALLS[: CALLS.index("ome")], stopped)]}


def streamed_of(text: str, reason: dict[str, Any]) -> list[Any]:
    """A streamed answer that ended for this reason: its text, names and arguments."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    serving = object.__new__(OpenAIServingChat)
    serving.tool_call_parser = "qwen25"
    serving.tokenizer_manager = SimpleNamespace(tokenizer=None)
    tools = [Tool(function={"name": "find", "parameters": {"type": "object"}})]
    request = SimpleNamespace(
        tools=tools, tool_choice="auto", messages=[], model="", stop_token_ids=[STOP],
        _response_parser_tool_grammar=None, _response_parser_grammar_start=None, _response_parser_prefix=None,
    )  # fmt: skip
    serving._effective_tools = lambda _request: tools
    content, parsers, events = {"meta_info": {"id": "", "finish_reason": reason}}, {}, []

    async def stream() -> None:
        for number, piece in enumerate(text or [""], start=1):
            given = serving._process_tool_call_stream(
                0, piece, parsers, content, request, {}, created=CREATED, flush=number >= len(text)
            )
            events.extend([event async for event in given])
        events.append(serving._check_for_unstreamed_tool_args(parsers[0], content, request, 0, created=CREATED) or "")

    asyncio.run(stream())
    streamed: list[Any] = [""]
    for line in "".join(events).splitlines():
        if line:
            event = json.loads(line.removeprefix("data: "))
            assert event["created"] == CREATED
            delta = event["choices"][0]["delta"]
            streamed[0] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["function"]["name"]:
                    streamed.append([call["function"]["name"], ""])
                streamed[-1][1] += call["function"]["arguments"]
    return streamed
