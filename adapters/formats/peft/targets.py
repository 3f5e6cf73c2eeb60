"""Which modules a PEFT configuration names, and with which rank and alpha, exactly as peft decides it.

Follows `peft.tuners.tuners_utils.check_target_module_exists` and `peft.utils.other.get_pattern_key` of peft 0.21; a
test compares the two.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.peft.bounded_regex import BoundedPattern, PatternRefused, compile_bounded

ALL_LINEAR = "all-linear"
_MAX_SECONDS = 5.0  # of CPU time for all expressions of one configuration
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

Value = TypeVar("Value")


class Stopwatch:
    """Bounds the CPU time that one configuration's expressions may take together."""

    def __init__(self) -> None:
        self._start_s = time.thread_time()

    def check(self, where: str) -> None:
        if time.thread_time() - self._start_s > _MAX_SECONDS:
            raise AdapterMalformed(
                f"{where}: its regular expressions take over {_MAX_SECONDS} s; name the modules instead"
            )


@dataclass(frozen=True, slots=True)
class Targets:
    """The part of a configuration that says which modules are adapted."""

    modules: str | tuple[str, ...]  # ALL_LINEAR, a regular expression, or names
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]  # empty: every layer
    layers_pattern: tuple[str, ...]
    where: str  # the configuration's name, for messages
    entries: frozenset[str] = field(init=False)  # of a list of modules
    excluded_entries: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for name, value in (("entries", self.modules), ("excluded_entries", self.excluded)):
            object.__setattr__(self, name, frozenset(() if isinstance(value, str) else value))

    def match(self, key: str) -> bool:
        """True where peft would put a LoRA on the module `key`, a linear one inside the decoder layers."""
        return not self.excludes(key) and self._is_named(key)

    def excludes(self, key: str) -> bool:
        if isinstance(self.excluded, str):
            return bool(self.excluded) and self._expression("exclude_modules", self.excluded).matches(key)
        return not self.excluded_entries.isdisjoint(endings(key))

    def _is_named(self, key: str) -> bool:
        if isinstance(self.modules, str):
            return self.modules == ALL_LINEAR or self._expression("target_modules", self.modules).matches(key)
        if key in self.entries:
            return True  # a full name is not subject to layers_to_transform
        return not self.entries.isdisjoint(endings(key)) and (not self.layers or self._layer_of(key) in self.layers)

    def _layer_of(self, key: str) -> int | None:
        if not self.layers_pattern:
            match = _FIRST_INDEX.match(key)
            return int(match["idx"]) if match else None
        for name in self.layers_pattern:
            if match := _compiled(rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\.").match(key):
                return int(match["idx"])
        return None

    def _expression(self, field: str, pattern: str) -> BoundedPattern:
        return expression(pattern, f"{self.where}: {field}")


def names(entry: str, key: str) -> bool:
    """True where an entry of a list of module names names the module `key`."""
    return key == entry or key.endswith(f".{entry}")


def endings(key: str) -> Iterator[str]:
    """All entries of a list of module names that would name the module `key`: itself, and what follows a dot."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


def expression(pattern: str, where: str) -> BoundedPattern:
    """A compiled expression. Raises AdapterMalformed or AdapterUnsupported with the reason."""
    try:
        return compile_bounded(pattern)
    except PatternRefused as refusal:
        kind = AdapterMalformed if "no valid" in str(refusal) else AdapterUnsupported
        raise kind(f"{where}: the regular expression {pattern[:80]!r} is refused: {refusal}") from refusal


class Patterns(Generic[Value]):
    """`rank_pattern` or `alpha_pattern`: a module has the value of the first pattern that matches its name.

    There may be one per module, so plain names, in which a dot matches any character, are looked up, not tried.
    """

    def __init__(self, patterns: Mapping[str, Value], where: str) -> None:
        self._values = list(patterns.values())
        self._where = where
        self._plain: dict[str, int] = {}  # pattern -> its number
        self._dots: dict[int, dict[tuple[int, ...], None]] = {}  # length -> where plain patterns of it have dots
        self._expressions: list[tuple[int, str]] = []
        for number, pattern in enumerate(patterns):
            if PLAIN_NAME.fullmatch(pattern):
                self._plain[pattern] = number
                dots = tuple(at for at, character in enumerate(pattern) if character == ".")
                self._dots.setdefault(len(pattern), {})[dots] = None
            else:
                self._expressions.append((number, pattern))

    def value_for(self, key: str, default: Value) -> Value:
        """The value for the module `key`. Raises AdapterMalformed or AdapterUnsupported for a bad expression."""
        first = min(self._plain_numbers(key), default=len(self._values))
        for number, pattern in self._expressions:
            if number > first:
                break
            if expression(rf"(.*\.)?({pattern})", self._where).matches(key):
                first = number
                break
        return self._values[first] if first < len(self._values) else default

    def _plain_numbers(self, key: str) -> Iterator[int]:
        for ending in endings(key):
            for dots in self._dots.get(len(ending), ()):
                masked = list(ending)
                for at in dots:
                    masked[at] = "."
                if (number := self._plain.get("".join(masked))) is not None:
                    yield number


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def as_targets(value: Any) -> bool:
    """True for a JSON value that may stand for target_modules or exclude_modules."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
