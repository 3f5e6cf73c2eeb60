"""The response object: its identity, the fields that it repeats from the request, its output items and its status."""

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from router.protocol.sse import Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]
_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}  # why an answer is incomplete


@dataclass(slots=True)
class MessageItem:
    """Text for the user."""

    id: str
    text: list[str] = field(default_factory=list)

    def shown(self, status: Status) -> dict[str, Any]:
        """As OpenAI has it."""
        return {"type": "message", "id": self.id, "status": status, "role": "assistant", "content": [self.part()]}

    def part(self) -> dict[str, Any]:
        """Its one part."""
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": []}


@dataclass(slots=True)
class ReasoningItem:
    """The model's reasoning before the answer."""

    id: str
    text: list[str] = field(default_factory=list)

    def shown(self, status: Status) -> dict[str, Any]:
        """As OpenAI has it."""
        return {"type": "reasoning", "id": self.id, "status": status, "summary": [], "content": [self.part()]}

    def part(self) -> dict[str, Any]:
        """Its one part."""
        return {"type": "reasoning_text", "text": "".join(self.text)}


@dataclass(slots=True)
class CallItem:
    """A function call for the client to make."""

    id: str
    call_id: str
    name: str
    text: list[str] = field(default_factory=list)  # of its arguments, JSON

    def shown(self, status: Status) -> dict[str, Any]:
        """As OpenAI has it."""
        called = {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.text)}
        return {"type": "function_call", "id": self.id, "status": status, **called}


Item = MessageItem | ReasoningItem | CallItem


class Response:
    """One response, from the arrival of its request."""

    def __init__(self, repeated: dict[str, Any], request_id: str, *, model: str, fingerprint: str) -> None:
        """`repeated`: the fields that come from the request, or are the same for all."""
        self.items: list[Item] = []
        self._request_id = request_id
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            **repeated,
        }

    def add_message(self) -> MessageItem:
        """Begin a message."""
        return self._added(MessageItem(self._item_id("msg")))

    def add_reasoning(self) -> ReasoningItem:
        """Begin an item of reasoning."""
        return self._added(ReasoningItem(self._item_id("rs")))

    def add_call(self, call_id: str | None, name: str | None) -> CallItem:
        """Begin a function call, with the engine's id, if it has given one."""
        item_id = self._item_id("fc")
        return self._added(CallItem(item_id, call_id or item_id.replace("fc", "call", 1), name or ""))

    def begun(self) -> dict[str, Any]:
        """The response object before any output."""
        return self._shown("in_progress", [], None)

    def ended(self, finish_reason: str, usage: Usage | None) -> dict[str, Any]:
        """The response object after all output. `finish_reason`: the chat's."""
        reason = _REASONS.get(finish_reason)
        status: Status = "completed" if reason is None else "incomplete"
        return self._shown(status, self._output(status), usage) | {
            "incomplete_details": reason and {"reason": reason},
        }

    def failed(self, error: dict[str, Any]) -> dict[str, Any]:
        """The response object after a failure. The output so far is marked incomplete."""
        return self._shown("failed", self._output("incomplete"), None) | {"error": error}

    def last_status(self, finish_reason: str) -> Status:
        """The status of the last item; all before it are complete."""
        return "completed" if _REASONS.get(finish_reason) is None else "incomplete"

    def _output(self, last: Status) -> list[dict[str, Any]]:
        return [item.shown(last if item is self.items[-1] else "completed") for item in self.items]

    def _shown(self, status: Status, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        end = {"error": None, "incomplete_details": None, "usage": usage and shown_usage(usage)}
        return {**self._head, "status": status, "output": output, **end}

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}{len(self.items):02d}"

    def _added(self, item: Any) -> Any:
        self.items.append(item)
        return item


def shown_usage(usage: Usage) -> dict[str, Any]:
    """Token counts under their names in responses."""
    cached = (usage.prompt_tokens_details or {}).get("cached_tokens")
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached or 0},
        "output_tokens": usage.completion_tokens or 0,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }
