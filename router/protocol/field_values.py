"""Reads single fields of a request. Errors name the field, the expected value and the one that was found."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import inspect

from adapters.identity import MAX_SCALE, SCALE_STEPS
from cluster.config.limits import RequestLimits
from router.errors import InvalidField
from router.protocol.fields import ADAPTER_SCALE
from router.protocol.request_body import Fields

DEFAULT_CONTEXT_LENGTH = 131_072  # where config.json has none
TYPICAL_ANSWER_TOKENS = 256  # where the client sets no limit
_MIN_PROMPT_BYTES = 16 * 1024
_MAX_REFERENCE_BYTES = 1024  # of `model` and `adapter`, as JSON
_SCALE_ERROR = 1e-6  # of clients' arithmetic
_ANSWER_LIMITS = ("max_completion_tokens", "max_tokens")


def answer_limit(fields: Fields) -> int | None:
    """The client's limit of answer tokens in a validated request; None if it sets none.

    The larger of the two fields, because engines use the first in chats and the second in completions.
    """
    return max([int(bytes(fields[name])) for name in _ANSWER_LIMITS if name in fields], default=None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this deployment."""

    max_choices: int  # prompts x n
    vocabulary: int  # token ids are below it
    context_length: int = DEFAULT_CONTEXT_LENGTH  # tokens of a prompt
    request: RequestLimits = field(default_factory=RequestLimits)

    @property
    def prompt_bytes(self) -> int:
        """The most bytes of a prompt's JSON text. Longer ones exceed the context length, or are mostly escapes."""
        return max(_MIN_PROMPT_BYTES, self.context_length * self.request.prompt_bytes_per_token)

    def check_prompt_size(self, name: str, num_bytes: int) -> None:
        """Raises InvalidField."""
        if num_bytes > self.prompt_bytes:
            raise InvalidField(
                f"{name} has {num_bytes} bytes; at most {self.prompt_bytes} are accepted, since the model's context "
                f"length is {self.context_length} tokens",
                param=name.partition("[")[0],
            )


def decoded(fields: Fields, name: str, kind: Any, expected: str) -> Any:
    """The value of a field, None if it is absent."""
    if name not in fields:
        return None
    try:
        return decode_field(fields, name, kind)
    except msgspec.MsgspecError:
        raise InvalidField(f"{name} must be {expected} (found {shown(fields[name])})", param=name) from None


def decode_field(fields: Fields, name: str, kind: Any) -> Any:
    """The value of a field. Takes out nulls inside it that are the same as nothing. Raises MsgspecError."""
    try:
        return msgspec.json.decode(fields[name], type=kind)
    except msgspec.ValidationError:
        fields[name] = without_nulls(fields[name], kind)
        return msgspec.json.decode(fields[name], type=kind)


def decoded_item(decoder: msgspec.json.Decoder[Any], raw: msgspec.Raw) -> Any:
    """The same for a part of a field. Raises MsgspecError."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        return decoder.decode(without_nulls(raw, decoder.type))


class Kind(msgspec.Struct):
    """What an object is, whatever else it has."""

    type: Any = None


_kind = msgspec.json.Decoder(Kind)


def type_of(raw: msgspec.Raw) -> Any:
    """What an object says of its `type`, whatever else it has. Raises MsgspecError."""
    return _kind.decode(raw).type


def without_nulls(raw: msgspec.Raw, kind: Any) -> msgspec.Raw:
    """A value of this type without nulls in fields that its objects do not know or do not need. Raises MsgspecError."""
    return _without_nulls(raw, _type_info(kind))


def _without_nulls(raw: msgspec.Raw, kind: inspect.Type) -> msgspec.Raw:
    first = bytes(memoryview(raw)[:1])
    for each in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(each, inspect.StructType) and first == b"{":
            known = {one.encode_name: one for one in each.fields}
            given = msgspec.json.decode(raw, type=Fields).items()
            return encoded({
                name: _without_nulls(value, known[name].type) if name in known else value
                for name, value in given
                if value != _NULL or (name in known and known[name].required)
            })  # fmt: skip
        if isinstance(each, inspect.ListType) and first == b"[":
            return encoded([_without_nulls(item, each.item_type) for item in _items.decode(raw)])
    return raw


_type_info = lru_cache(maxsize=64)(inspect.type_info)


def encoded(value: object) -> msgspec.Raw:
    """A field's value as JSON."""
    return msgspec.Raw(msgspec.json.encode(value))


def string(fields: Fields, name: str) -> str | None:
    value = decoded(fields, name, str, "a string")
    if value == "":
        raise InvalidField(f"{name} must not be empty", param=name)
    return value


def reference(fields: Fields, name: str) -> str | None:
    """The value of `model` or `adapter`, short enough to be quoted."""
    if name in fields and len(memoryview(fields[name])) > _MAX_REFERENCE_BYTES:
        raise InvalidField(f"{name} has over {_MAX_REFERENCE_BYTES} bytes", param=name)
    return string(fields, name)


def boolean(fields: Fields, name: str) -> bool:
    raw = fields.get(name)
    if raw is None:
        return False
    return raw == _TRUE or bool(decoded(fields, name, bool, "true or false"))


def integer(fields: Fields, name: str, least: int, most: int) -> int | None:
    raw = fields.get(name)
    if raw is None:
        return None
    text = bytes(raw)
    is_plain = text.lstrip(b"-").isdigit()  # engines reject 1.0
    if is_plain and len(text) <= 20 and least <= (value := int(text)) <= most:  # JSON has one spelling of it
        return value
    expected = f"an integer from {least} to {most}"
    value = decoded(fields, name, int, expected)
    if not is_plain or not least <= value <= most:
        raise InvalidField(f"{name} must be {expected} (found {shown(fields[name])})", param=name)
    return value


def number(fields: Fields, name: str, least: float, most: float, *, is_above: bool = False) -> float | None:
    """`is_above`: the value must be above `least`."""
    value = decoded(fields, name, float, "a number")
    if value is not None and (not least <= value <= most or (is_above and value == least)):
        bounds = f"above {least:g}, at most {most:g}" if is_above else f"from {least:g} to {most:g}"
        raise InvalidField(f"{name} must be {bounds} (found {shown(fields[name])})", param=name)
    return value


def adapter_scale(fields: Fields) -> float | None:
    """How strongly the adapter acts. Raises InvalidField."""
    value = number(fields, ADAPTER_SCALE, 1 / SCALE_STEPS, MAX_SCALE)
    if value is None:
        return None
    scale = round(value * SCALE_STEPS) / SCALE_STEPS
    if abs(value - scale) > _SCALE_ERROR:
        raise InvalidField(
            f"{ADAPTER_SCALE} must be a multiple of {1 / SCALE_STEPS:g} (found {shown(fields[ADAPTER_SCALE])}); "
            f"{scale:g} is the nearest",
            param=ADAPTER_SCALE,
        )
    return scale


def check_token_id_field(fields: Fields, name: str, limits: Limits) -> None:
    """A prompt as token ids."""
    if name in fields:
        check_token_ids(name, decode_token_ids(fields[name], name, limits), limits)


def decode_token_ids(raw: msgspec.Raw, name: str, limits: Limits) -> list[int]:
    """A prompt's token ids, no more than the context has. Raises InvalidField."""
    param = name.partition("[")[0]
    limits.check_prompt_size(name, len(memoryview(raw)))
    try:
        ids = _ids.decode(raw)
    except msgspec.MsgspecError:
        raise InvalidField(f"{name} must be a list of token ids (found {shown(raw)})", param=param) from None
    if len(ids) > limits.context_length:
        raise InvalidField(
            f"{name} has {len(ids)} token ids; the model's context length is {limits.context_length}", param=param
        )
    return ids


def check_token_ids(name: str, ids: list[int], limits: Limits) -> None:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocabulary):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        param = name.partition("[")[0]
        raise InvalidField(f"{name}: token id {wrong} is not in [0, {limits.vocabulary})", param=param)


_TRUE, _NULL = msgspec.Raw(b"true"), msgspec.Raw(b"null")
_ids = msgspec.json.Decoder(list[int])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_SMALL_BYTES = 4096


def items_of(raw: msgspec.Raw, name: str, most: int, what: str, expected: str) -> list[msgspec.Raw]:
    """The items of a field that is a list. Raises InvalidField, also if there are more than `most`."""
    try:
        items = _bounded_list(raw, most)
    except msgspec.MsgspecError:
        raise InvalidField(f"{name} must be {expected} (found {shown(raw)})", param=name) from None
    if items is None:
        raise InvalidField(f"{name} has more than {most} {what}, which are the most that are accepted", param=name)
    return items


def _bounded_list(raw: msgspec.Raw, most: int) -> list[msgspec.Raw] | None:
    """The items of a list, None if there are more than `most`. Raises MsgspecError if it is no list.

    A long list is not decoded beyond the bound, since a million items would hold the interpreter's lock for long.
    """
    if len(memoryview(raw)) <= _SMALL_BYTES:
        items = _items.decode(raw)
        return items if len(items) <= most else None
    try:
        row = _row_decoder(most).decode(raw)
    except msgspec.ValidationError:
        if memoryview(raw)[:1] == b"[":
            return None
        raise
    return [item for item in msgspec.structs.astuple(row) if item is not msgspec.UNSET]


@lru_cache(maxsize=8)
def _row_decoder(most: int) -> msgspec.json.Decoder[Any]:
    fields = [(f"item{i}", msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for i in range(most)]
    row = msgspec.defstruct("Row", fields, array_like=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(row)


def shown(raw: msgspec.Raw) -> str:
    """A value for an error message, shortened because it may be a prompt."""
    text = bytes(memoryview(raw)[:200]).decode("utf-8", "replace")
    return text if len(text) <= 40 else f"{text[:37]}..."
