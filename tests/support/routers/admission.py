"""Requests as the router admits them: made of a few fields, and what engines get of them."""

import json
from functools import partial
from typing import Any

from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, ValidatedRequest, validate

LIMITS = Limits(max_choices=8, vocabulary=1000, context_length=4096)
USER = {"role": "user", "content": "Hi"}
_NEEDED: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"messages": [USER]},
    Endpoint.COMPLETIONS: {"prompt": "Hi"},
    Endpoint.RESPONSES: {"input": "Hi"},
    Endpoint.EMBEDDINGS: {"input": "Hi"},
}


def admit(endpoint: Endpoint, limits: Limits = LIMITS, **fields: Any) -> ValidatedRequest:
    """Raises RequestError."""
    body = {"model": "base", **_NEEDED[endpoint], **fields}
    return validate(endpoint, json.dumps(body).encode(), limits)


chat, complete = partial(admit, Endpoint.CHAT), partial(admit, Endpoint.COMPLETIONS)


def sent(endpoint: Endpoint, limits: Limits = LIMITS, **fields: Any) -> list[dict[str, Any]]:
    """The fields of each sequence as engines get them. Raises RequestError."""
    sequences = admit(endpoint, limits, **fields).sequences()
    return [{name: json.loads(bytes(value)) for name, value in each.fields.items()} for each in sequences]


def chat_sent(**fields: Any) -> dict[str, Any]:
    """The fields of a chat with one choice, as engines get them. Raises RequestError."""
    (found,) = sent(Endpoint.CHAT, **fields)
    return found


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def of_schema(schema: Any) -> dict[str, Any]:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
