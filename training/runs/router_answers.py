"""The URL of a cluster's router, and the reading of its errors."""

from __future__ import annotations

from typing import Any

_SHOWN, _SHOWN_OF_OTHERS = 300, 200  # characters


def address(url: str, path: str) -> str:
    """A path of the router's API; its URL may end with `/v1`, as OpenAI's clients have it."""
    return f"{url.rstrip('/').removesuffix('/v1')}{path}"


def error_of(body: Any) -> dict[str, Any]:
    """The error in an answer's body; empty if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def reason(body: Any) -> str:
    """Code and message of the error in a body, or the body itself, shortened."""
    if error := error_of(body):
        return f"{error.get('code')}: {error.get('message')}"[:_SHOWN]
    return str(body)[:_SHOWN_OF_OTHERS]
