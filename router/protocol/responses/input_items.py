"""Translates `input`, a text or a list of items, to the messages of a chat.

The items of one answer (reasoning, a message, function calls) become one assistant message again.
"""

from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.field_values import Limits, decoded, decoded_item, items_of, shown, type_of
from router.protocol.messages import check_arguments, readable
from router.protocol.request_body import Fields

ROLES = ("user", "assistant", "system", "developer")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
PARTS = ("input_text", "output_text", "refusal")

_NOT_OFFERED = {
    "item_reference": "items are not stored; send the item itself",
    "input_image": "the model takes text",
    "input_file": "the model takes text",
    "input_audio": "the model takes text",
}

_Message = dict[str, Any]  # of a chat


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    # what answers have and clients send back
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None


class _MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[msgspec.Raw]
    type: str | None = None
    id: str | None = None
    status: str | None = None


class _Call(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class _CallOutput(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    call_id: str
    output: str | list[msgspec.Raw]
    id: str | None = None
    status: str | None = None


class _Thought(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    summary: list[_Thought] | None = None
    content: list[_Thought] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: str | None = None


_part_decoder = msgspec.json.Decoder(_Part)
_message = msgspec.json.Decoder(_MessageItem)
_call = msgspec.json.Decoder(_Call)
_call_output = msgspec.json.Decoder(_CallOutput)
_reasoning = msgspec.json.Decoder(_Reasoning)


def messages_of(fields: Fields, limits: Limits) -> msgspec.Raw:
    """The messages made of `instructions` and `input`. Raises InvalidField."""
    messages: list[bytes] = []
    if instructions := decoded(fields, "instructions", str, "a string"):
        limits.check_prompt_size("instructions", len(memoryview(fields["instructions"])))
        messages.append(msgspec.json.encode({"role": "system", "content": instructions}))
    if "input" not in fields:
        raise InvalidField("input is required: a string, or a list of at least one item", param="input")
    raw = fields["input"]
    limits.check_prompt_size("input", len(memoryview(raw)))
    if memoryview(raw)[:1] == b'"':
        text = decoded(fields, "input", str, "a string or a list of items")
        messages.append(msgspec.json.encode({"role": "user", "content": text}))
    else:
        messages += _messages_of_items(raw, limits)
    return msgspec.Raw(b"[" + b",".join(messages) + b"]")


def _messages_of_items(raw: msgspec.Raw, limits: Limits) -> list[bytes]:
    items = items_of(raw, "input", limits.request.messages, "items", "a string or a list of items")
    if not items:
        raise InvalidField("input must have at least one item", param="input")
    conversation = _Conversation(limits.request.nesting)
    for i, item in enumerate(items):
        try:
            conversation.add(item, f"input[{i}]")
        except msgspec.MsgspecError as error:
            found = f" (found {shown(item)})" if memoryview(item)[:1] != b"{" else ""
            raise InvalidField(f"input[{i}]: {readable(error)}{found}", param="input") from None
    return conversation.end()


class _Conversation:
    """Collects items as messages. Items of one answer are held back until another kind of item follows."""

    def __init__(self, max_nesting: int) -> None:
        self._max_nesting = max_nesting
        self._messages: list[bytes] = []
        self._answer: _Message = {}

    def add(self, raw: msgspec.Raw, where: str) -> None:
        """Raises InvalidField or MsgspecError."""
        kind = type_of(raw) or "message"
        if kind == "message":
            self._add_message(decoded_item(_message, raw), where)
        elif kind == "function_call":
            self._add_call(decoded_item(_call, raw), where)
        elif kind == "function_call_output":
            output = decoded_item(_call_output, raw)
            content = _content(output.output, f"{where}.output")
            self._append({"role": "tool", "tool_call_id": output.call_id, "content": content})
        elif kind == "reasoning":
            self._add_reasoning(decoded_item(_reasoning, raw), where)
        else:
            raise _not_offered(f"{where}.type", kind, ITEMS)

    def end(self) -> list[bytes]:
        """All messages, each as JSON."""
        self._end_answer()
        return self._messages

    def _add_message(self, item: _MessageItem, where: str) -> None:
        if item.role not in ROLES:
            raise InvalidField(
                f"{where}.role must be one of {', '.join(ROLES)} (found {item.role[:40]!r})", param="input"
            )
        content = _content(item.content, f"{where}.content")
        if item.role != "assistant":
            self._append({"role": item.role, "content": content})
            return
        if "content" in self._answer or "tool_calls" in self._answer:
            self._end_answer()
        self._answer["content"] = content

    def _add_call(self, item: _Call, where: str) -> None:
        check_arguments(item.arguments, f"{where}.arguments", "input", self._max_nesting)
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        self._answer.setdefault("tool_calls", []).append(call)

    def _add_reasoning(self, item: _Reasoning, where: str) -> None:
        if item.encrypted_content is not None:
            raise InvalidField(f"{where}.encrypted_content cannot be read here; remove it", param="input")
        if "content" in self._answer or "tool_calls" in self._answer:
            self._end_answer()
        if text := "\n".join(thought.text for thought in item.content or item.summary or ()):
            before = self._answer.get("reasoning_content")
            self._answer["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def _append(self, message: _Message) -> None:
        self._end_answer()
        self._messages.append(msgspec.json.encode(message))

    def _end_answer(self) -> None:
        if self._answer:
            self._messages.append(msgspec.json.encode({"role": "assistant", **self._answer}))
            self._answer = {}


def _content(found: str | list[msgspec.Raw], where: str) -> str | list[dict[str, str]]:
    """The content of a message. A single text stays a string, since templates may put separators between parts."""
    if isinstance(found, str):
        return found
    parts = [_part(part, f"{where}[{j}]") for j, part in enumerate(found)]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(raw: msgspec.Raw, where: str) -> dict[str, str]:
    try:
        kind = type_of(raw)
        if kind not in PARTS:
            raise _not_offered(f"{where}.type", kind, PARTS)
        part = decoded_item(_part_decoder, raw)
    except msgspec.MsgspecError as error:
        raise InvalidField(f"{where}: {readable(error)}", param="input") from None
    text = part.refusal if part.type == "refusal" else part.text
    if text is not None:
        return {"type": "text", "text": text}
    raise InvalidField(
        f"{where}.{'refusal' if part.type == 'refusal' else 'text'} is required: a string", param="input"
    )


def _not_offered(where: str, found: Any, known: tuple[str, ...]) -> InvalidField:
    if isinstance(found, str) and found in _NOT_OFFERED:
        return InvalidField(f"{where}: {found} is not offered: {_NOT_OFFERED[found]}", param="input")
    return InvalidField(f"{where} must be one of {', '.join(known)} (found {repr(found)[:60]})", param="input")
