"""Reads single fields of a request. Errors name the field, the expected value and the one that was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import InvalidField
from router.protocol.request_body import Fields


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this deployment."""

    max_choices: int  # prompts x n
    vocabulary: int  # token ids are below it


def decoded(fields: Fields, name: str, kind: Any, expected: str) -> Any:
    """The value of a field, None if it is absent."""
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except msgspec.MsgspecError:
        raise InvalidField(f"{name} must be {expected} (found {shown(fields[name])})", param=name) from None


def string(fields: Fields, name: str) -> str | None:
    value = decoded(fields, name, str, "a string")
    if value == "":
        raise InvalidField(f"{name} must not be empty", param=name)
    return value


def boolean(fields: Fields, name: str) -> bool:
    return bool(decoded(fields, name, bool, "true or false"))


def integer(fields: Fields, name: str, least: int, most: int) -> int | None:
    expected = f"an integer from {least} to {most}"
    value = decoded(fields, name, int, expected)
    if value is not None:
        is_plain = bytes(fields[name]).lstrip(b"-").isdigit()  # engines reject 1.0
        if not is_plain or not least <= value <= most:
            raise InvalidField(f"{name} must be {expected} (found {shown(fields[name])})", param=name)
    return value


def check_token_id_field(fields: Fields, name: str, limits: Limits) -> None:
    if name in fields:
        check_token_ids(name, decoded(fields, name, list[int], "a list of token ids"), limits)


def check_token_ids(name: str, ids: list[int], limits: Limits) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocabulary):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        param = name.partition("[")[0]
        raise InvalidField(f"{name}: token id {wrong} is not in [0, {limits.vocabulary})", param=param)


def shown(raw: msgspec.Raw) -> str:
    """A value for an error message, shortened, because it may be a prompt."""
    text = bytes(raw).decode("utf-8", "replace")
    return text if len(text) <= 40 else f"{text[:37]}..."
