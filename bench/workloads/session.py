"""Sessions of one or more requests, as bytes that depend only on the seed."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, without model, adapter and sampling fields, which the endpoint decides."""

    path: str  # COMPLETIONS or CHAT
    content: dict[str, Any]  # `prompt`, or `messages` and `tools`
    max_tokens: int
    pause_s: float = 0.0  # between the end of the session's previous request and this one
    prompt_tokens: int | None = None  # where the prompt is token ids


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of one user, each sent when the one before is answered."""

    number: int
    adapter: int | None  # from 0; None: the base model
    requests: tuple[Request, ...] = field(default=())


def canonical_bytes(session: Session) -> bytes:
    """The session as bytes: equal for equal seeds."""
    return msgspec.json.encode(session, order="deterministic") + b"\n"
