"""Parse strict JSON: one object, no repeated keys, no NaN, every field of the expected type."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from adapters.errors import AdapterMalformed
from adapters.formats.folder import AdapterFolder

MAX_CONFIG_BYTES = 1024**2


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object in `text`. Raises AdapterMalformed, naming `where`."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_repeats, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise AdapterMalformed(f"{where} is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise AdapterMalformed(f"{where} holds {_type(value)}; it must hold an object, {{…}}")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object. A field that is absent or null takes the default."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def read(cls, folder: AdapterFolder, name: str) -> Self:
        return cls(parse_object(folder.read_small(name, MAX_CONFIG_BYTES), name), name)

    def wrong(self, key: str, expected: str) -> AdapterMalformed:
        """The error for a field of the wrong type or value."""
        shown = json.dumps(self.values.get(key))
        return AdapterMalformed(f"{self.where}: {key} is {shown[:100]}; it must be {expected}")

    def has(self, key: str) -> bool:
        """True unless the field is absent, null, false, 0, "", [] or {}."""
        return bool(self.values.get(key))

    def string(self, key: str, default: str | None = None) -> str | None:
        return self._value(key, default, lambda value: isinstance(value, str), "a string")

    def boolean(self, key: str) -> bool:
        return self._value(key, False, lambda value: isinstance(value, bool), "true or false")

    def number(self, key: str, default: float) -> float:
        return self._value(key, default, is_number, "a finite number")

    def object(self, key: str) -> dict[str, Any]:
        return self._value(key, {}, lambda value: isinstance(value, dict), "an object")

    def _value(self, key: str, default: Any, is_right: Callable[[Any], bool], expected: str) -> Any:
        value = self.values.get(key)
        if value is not None and not is_right(value):
            raise self.wrong(key, expected)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 0) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(key, f"an integer of at least {minimum}")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of integers from 0; a single integer becomes a list of one."""
        value = self.values.get(key)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        if not all(is_integer(item) and item >= 0 for item in items):
            raise self.wrong(key, "an integer or a list of integers, none negative")
        return tuple(items)


def is_integer(value: object) -> bool:
    """True for a JSON integer. Python's True is not one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """True for a JSON number that a float can hold."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} occurs twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _type(value: object) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")
