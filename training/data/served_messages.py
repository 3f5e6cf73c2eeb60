"""Converts messages and tools to what SGLang's chat endpoint passes to a chat template. Text content only.

What routers (router/protocol/messages.py) and then `_process_messages` make of a request
(sglang/srt/entrypoints/openai/serving_chat.py, 0.5.23): roles that templates know, known fields in SGLang's order
without null, arguments of tool calls as objects, tools with the fields of the request in its order, then the rest.
Training has no SGLang, so it is done again here; tests/unit/training/data/test_served_messages.py compares the two.
Not done: for templates that read `tool_call_id`, SGLang sorts the results of tools by their calls.
"""

import json
from collections.abc import Sequence
from typing import Any, NoReturn

from training.data.columns import Message
from training.data.jsonl import RowFault

_ROLES = {"developer": "system", "function": "tool"}  # as routers map them
_TEXTS = ("tool_call_id", "name", "reasoning_content")


def served_context(messages: Sequence[Message]) -> list[Message]:
    """What a request's messages become: an answer at their end is taken for a user's. Raises RowFault."""
    served = [served_message(message) for message in messages]
    if served and served[-1]["role"] == "assistant":
        served[-1] = {"role": "user", "content": served[-1]["content"]}
    return served


def served_message(message: Message) -> Message:
    """One message before others. Raises RowFault for what workers refuse."""
    role, content = message["role"], message.get("content")
    if message.get("tools") is not None:
        raise RowFault("a message has `tools`; they belong into the row, beside the messages")
    if role == "user":
        if content is None:
            raise RowFault("a user's message has no content; give it some")
        return {"role": role, "content": content}
    served = {"role": _ROLES.get(role, role), "content": "" if content is None else content}
    for name in _TEXTS:
        if (value := message.get(name)) is not None:
            served[name] = _of_type(value, str, f"`{name}`")
    if (calls := message.get("tool_calls")) is not None:
        served["tool_calls"] = [_call(call, role) for call in _of_type(calls, list, "`tool_calls`")]
    return served


def served_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """Tools with the fields that they lack. Raises RowFault."""
    return [_tool(tool) for tool in tools] if tools else None


def _call(call: Any, role: str) -> dict[str, Any]:
    function = _function(call, "`tool_calls`", '{"function": {"name": …, "arguments": …}}')
    if (kind := call.get("type", "function")) != "function":
        raise RowFault(f"a tool call's type is {kind!r:.60}; workers take 'function'")
    name, arguments = function.get("name"), function.get("arguments") or "{}"
    if isinstance(arguments, str) and role == "assistant":
        arguments = _parsed(arguments)
    return {
        "id": _of_type(call.get("id"), (str, type(None)), "`id` of a tool call"),
        "index": _of_type(call.get("index"), (int, type(None)), "`index` of a tool call"),
        "type": kind,
        "function": {
            "name": _of_type(name, (str, type(None)), "`name` of a tool call"),
            "arguments": _of_type(arguments, (str, dict, type(None)), "`arguments` of a tool call"),
        },
    }


def _parsed(arguments: str) -> Any:
    try:
        parsed = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RowFault(f"`arguments` of a tool call are {arguments!r:.60}; they must be a JSON object")
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _tool(tool: Any) -> dict[str, Any]:
    function = _function(tool, "`tools`", '{"type": "function", "function": {"name": …}}')
    deferred = _of_type(tool.get("defer_loading"), (bool, type(None)), "`defer_loading`")
    own = _of_type(function.get("defer_loading"), (bool, type(None)), "`defer_loading`")
    served = {
        "description": _of_type(function.get("description"), (str, type(None)), "`description` of a tool"),
        "name": _of_type(function.get("name"), str, "`name` of a tool"),
        "parameters": function.get("parameters"),
    }
    if (strict := _of_type(function.get("strict"), (bool, type(None)), "`strict` of a tool")) is not None:
        served["strict"] = strict
    if (of_function := deferred if own is None else own) is not None:
        served["defer_loading"] = of_function
    served = {key: served[key] for key in dict.fromkeys((*function, *served)) if key in served}
    kind = _of_type(tool.get("type", "function"), str, "`type` of a tool")
    return {"type": kind, "function": served, "defer_loading": deferred}


def _function(value: Any, where: str, shape: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise RowFault(f"{where} has {value!r:.80}, which has no `function`; one is {shape}")
    return function


def _of_type(value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, kinds):
        raise RowFault(f"{what} is a {type(value).__name__} ({value!r:.60}), which workers refuse")
    return value
