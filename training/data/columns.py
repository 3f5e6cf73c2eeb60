"""Derives from a row's columns, which are trl's, what it trains.

SFT: `prompt` and `completion`, both texts or both lists of messages; or `messages`.
Preferences: `prompt`, `chosen` and `rejected`, all texts or all lists of messages; or `chosen` and `rejected`, two
conversations that differ in their last message.
Prompts: `prompt` or `messages`, with or without an answer.
A conversation may come with `tools` and `chat_template_kwargs`. Other columns are ignored, as trl ignores them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.data.jsonl import RowFault

Message = dict[str, Any]

# That SGLang takes (sglang/srt/entrypoints/openai/protocol.py). A template renders any other as it likes.
ROLES = ("system", "user", "assistant", "tool", "function", "developer", "latest_reminder")
_SFT = "`prompt` and `completion`, or `messages`"
_PREFERENCES = "`prompt`, `chosen` and `rejected`"


@dataclass(frozen=True, slots=True)
class TextTurn:
    """One prompt with one answer, or with a chosen and a rejected one, as plain text."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A conversation up to an answer, and that answer, or a chosen and a rejected one."""

    context: tuple[Message, ...]
    answers: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The trained turns of one conversation, and what its template gets besides messages."""

    turns: tuple[ChatTurn, ...]
    tools: Sequence[Any] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def sft_row(columns: Mapping[str, Any]) -> TextTurn | Conversation:
    """What an SFT row trains: every assistant message of `messages`, or of `completion`. Raises RowFault."""
    has = {name for name in ("prompt", "completion", "messages") if columns.get(name) is not None}
    if has == {"messages"}:
        messages = _messages(columns, "messages")
        return _conversation(columns, _turns_of(messages, 0, "messages"))
    if has != {"prompt", "completion"}:
        raise RowFault(_wrong_columns(columns, has, _SFT))
    if _all_are(columns, ("prompt", "completion"), str):
        return TextTurn(_prompt(columns), (_answer(columns, "completion"),))
    if not _all_are(columns, ("prompt", "completion"), list):
        raise RowFault(_mixed(columns, ("prompt", "completion")))
    prompt = _messages(columns, "prompt")
    completion = _messages(columns, "completion")
    return _conversation(columns, _turns_of((*prompt, *completion), len(prompt), "completion"))


def prompt_row(columns: Mapping[str, Any]) -> TextTurn | Conversation:
    """A row's prompts: those of `sft_row`, and one that has no answer in the row. Raises RowFault."""
    has = {name for name in ("prompt", "completion", "messages") if columns.get(name) is not None}
    if has == {"prompt"} and isinstance(columns["prompt"], str):
        return TextTurn(_prompt(columns), ())
    if len(has) == 1:
        messages = _messages(columns, *has)
        if has == {"prompt"} or messages[-1]["role"] != "assistant":
            return _conversation(columns, [ChatTurn(messages, ())])
    return sft_row(columns)


def preference_row(columns: Mapping[str, Any]) -> TextTurn | Conversation:
    """The prompt with its chosen and its rejected answer. Raises RowFault."""
    names = ("prompt", "chosen", "rejected")
    has = {name for name in names if columns.get(name) is not None}
    if not has >= {"chosen", "rejected"}:
        raise RowFault(_wrong_columns(columns, has, _PREFERENCES))
    if has == {"chosen", "rejected"}:
        if not _all_are(columns, ("chosen", "rejected"), list):
            raise RowFault(
                "there is no `prompt`; only two conversations can go without, which differ in the last message"
            )
        chosen, rejected = _messages(columns, "chosen"), _messages(columns, "rejected")
        if chosen[:-1] != rejected[:-1]:
            raise RowFault("`chosen` and `rejected` differ before their last message; name what they share in `prompt`")
        return _conversation(columns, [_preference(chosen[:-1], chosen[-1:], rejected[-1:])])
    if _all_are(columns, names, str):
        answers = tuple(_answer(columns, name) for name in ("chosen", "rejected"))
        if answers[0] == answers[1]:
            raise RowFault("`chosen` and `rejected` are equal; there is nothing to prefer")
        return TextTurn(_prompt(columns), answers)
    if not _all_are(columns, names, list):
        raise RowFault(_mixed(columns, names))
    prompt, chosen, rejected = (_messages(columns, name) for name in names)
    return _conversation(columns, [_preference(prompt, chosen, rejected)])


def _turns_of(messages: tuple[Message, ...], begin: int, column: str) -> list[ChatTurn]:
    """A turn for every message of the assistant from `begin` on."""
    turns = [
        ChatTurn(messages[:number], (_checked_answer(message, f"message {number + 1 - begin} of `{column}`"),))
        for number, message in enumerate(messages)
        if number >= begin and message["role"] == "assistant"
    ]
    if not turns:
        raise RowFault(f"`{column}` has no message of the role 'assistant'; there is no answer to train")
    return turns


def _preference(context: tuple[Message, ...], chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> ChatTurn:
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if len(answer) != 1 or answer[0]["role"] != "assistant":
            raise RowFault(
                f"`{name}` has {len(answer)} messages with roles {[each['role'] for each in answer]!r:.120}; one of "
                "the role 'assistant' is compared, what comes before belongs into `prompt`"
            )
    answers = (_checked_answer(chosen[0], "`chosen`"), _checked_answer(rejected[0], "`rejected`"))
    if answers[0] == answers[1]:
        raise RowFault("`chosen` and `rejected` are equal; there is nothing to prefer")
    return ChatTurn(context, answers)


def _conversation(columns: Mapping[str, Any], turns: Sequence[ChatTurn]) -> Conversation:
    if not all(turn.context for turn in turns):
        raise RowFault("no context: the first message is an answer; put the question before it")
    tools, arguments = columns.get("tools"), columns.get("chat_template_kwargs")
    if tools is not None and not isinstance(tools, list):
        raise RowFault(f"`tools` is a {type(tools).__name__}; it is a list of functions")
    if arguments is not None and not isinstance(arguments, dict):
        raise RowFault(f"`chat_template_kwargs` is a {type(arguments).__name__}; it is an object")
    if wrong := [name for name, value in (arguments or {}).items() if isinstance(value, (dict, list))]:
        raise RowFault(f"`chat_template_kwargs`: {wrong[0]!r:.60} is no single value")
    return Conversation(tuple(turns), tools, arguments or {})


def _messages(columns: Mapping[str, Any], column: str) -> tuple[Message, ...]:
    messages = columns[column]
    if not isinstance(messages, list) or not messages:
        raise RowFault(f"`{column}` is {messages!r:.60}; it is a list of messages")
    for number, message in enumerate(messages, 1):
        where = f"message {number} of `{column}`"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
            raise RowFault(f"{where} is {message!r:.60}; it is an object with `role` and `content`")
        if message["role"] not in ROLES:
            raise RowFault(f"{where}: the role is {message['role']!r:.60}; workers take {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RowFault(f"{where}: `content` is a {type(content).__name__} ({content!r:.60}); it is a string")
    return tuple(messages)


def _checked_answer(message: Message, where: str) -> Message:
    if not (message.get("content") or "").strip() and not message.get("tool_calls"):
        raise RowFault(f"{where} is an empty answer; remove the row or fill it in")
    return message


def _prompt(columns: Mapping[str, Any]) -> str:
    if not columns["prompt"]:
        raise RowFault("no context: `prompt` is empty; the adapter is applied to the prompt, so there must be one")
    return columns["prompt"]


def _answer(columns: Mapping[str, Any], column: str) -> str:
    if not columns[column].strip():
        raise RowFault(f"`{column}` is an empty answer; remove the row or fill it in")
    return columns[column]


def _all_are(columns: Mapping[str, Any], names: Sequence[str], kind: type) -> bool:
    return all(isinstance(columns[name], kind) for name in names)


def _mixed(columns: Mapping[str, Any], names: Sequence[str]) -> str:
    types = ", ".join(f"`{name}` is a {type(columns[name]).__name__}" for name in names)
    return f"{types}; all are strings, or all are lists of messages"


def _wrong_columns(columns: Mapping[str, Any], has: set[str], wanted: str) -> str:
    if has and "messages" in has:
        return f"has `messages` and {', '.join(f'`{name}`' for name in sorted(has - {'messages'}))}; it needs {wanted}"
    found = ", ".join(repr(str(name)[:40]) for name in list(columns)[:8]) or "none"
    return f"the columns are {found}; it needs {wanted}"
