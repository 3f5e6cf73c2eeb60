"""Bounds on every field of every request to an agent. Requests outside of them are refused with INVALID_ARGUMENT."""

import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from adapters.identity import split_scaled_id
from cluster.config.fields import MAX_DURATION_S

Check = Callable[[Any], bool]

MAX_MESSAGE_BYTES = 2 * 1024**2  # of any request; a chunk of PutAdapter has at most 1 MiB
MIN_HEARTBEAT_S = 0.05
MAX_HEARTBEAT_S = 3600.0
_MAX_CHUNK_BYTES = 1024**2
_MAX_CONTENT_BYTES = 2**40
_MAX_ITEMS = 1024  # of a repeated field
_PRINTABLE = re.compile(r"[^\x00-\x1f\x7f]{0,256}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _matches(pattern: re.Pattern[str]) -> Check:
    return lambda value: pattern.fullmatch(value) is not None


def _is_scaled_id(value: str) -> bool:
    with suppress(ValueError):
        return bool(split_scaled_id(value))
    return False


def _from_zero_to(largest: float) -> Check:
    return lambda value: 0 <= value <= largest  # false for NaN


# By the field's name: what it must be, and whether a value is that. Zero and the empty string are the default.
_BY_NAME: Mapping[str, tuple[str, Check]] = {
    "heartbeat_s": (
        f"0, or from {MIN_HEARTBEAT_S} to {MAX_HEARTBEAT_S:.0f} seconds",
        lambda value: value == 0 or MIN_HEARTBEAT_S <= value <= MAX_HEARTBEAT_S,
    ),
    "revision_id": ("'sha256:' and 64 lower-case hex digits, perhaps 'x' and a scale", _is_scaled_id),
    "content_sha256": ("64 lower-case hex digits", _matches(_SHA256)),
    "content_bytes": (f"from 1 to {_MAX_CONTENT_BYTES} bytes", lambda value: 1 <= value <= _MAX_CONTENT_BYTES),
    "signature": ("64 bytes long, or empty", lambda value: len(value) in (0, 64)),
    "chunk": (f"from 1 to {_MAX_CHUNK_BYTES} bytes long", lambda value: 1 <= len(value) <= _MAX_CHUNK_BYTES),
}
_INTEGER = ("from 0 to 2^53", _from_zero_to(2**53))
_DURATION = (f"from 0 to {MAX_DURATION_S:.0f} seconds", _from_zero_to(MAX_DURATION_S))
# Of other fields, so that one that is added later has a bound, too.
_BY_TYPE: Mapping[int, tuple[str, Check]] = {
    FieldDescriptor.CPPTYPE_DOUBLE: _DURATION,
    FieldDescriptor.CPPTYPE_FLOAT: _DURATION,
    FieldDescriptor.CPPTYPE_INT32: _INTEGER,
    FieldDescriptor.CPPTYPE_INT64: _INTEGER,
    FieldDescriptor.CPPTYPE_UINT32: _INTEGER,
    FieldDescriptor.CPPTYPE_UINT64: _INTEGER,
    FieldDescriptor.CPPTYPE_BOOL: ("true or false", lambda value: isinstance(value, bool)),
    FieldDescriptor.CPPTYPE_STRING: (
        "at most 256 characters without control characters, or as many bytes",
        lambda value: len(value) <= 256 if isinstance(value, bytes) else _PRINTABLE.fullmatch(value) is not None,
    ),
}


def out_of_bounds(message: Message) -> str | None:
    """The error of a request: the first field outside its bounds, its value, and what would be right. None: none."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        values = list(value) if field.is_repeated else [value]
        if len(values) > _MAX_ITEMS:
            return f"{field.name} must have at most {_MAX_ITEMS} items (found {len(values)})"
        if field.containing_oneof is not None and not message.HasField(field.name):
            continue
        for each in values:
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                problem = out_of_bounds(each) if field.is_repeated or message.HasField(field.name) else None
                if problem is not None:
                    return f"{field.name}.{problem}"
                continue
            expected, is_valid = _bound_of(field)
            if not is_valid(each):
                return f"{field.name} must be {expected} (found {_shown(each)})"
    return None


def _bound_of(field: Any) -> tuple[str, Check]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        known = field.enum_type.values_by_number
        return f"one of {', '.join(value.name for value in known.values())}", known.__contains__
    return _BY_NAME.get(field.name) or _BY_TYPE[field.cpp_type]


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…'"
