"""Decide which modules a PEFT configuration adapts, and their rank and alpha, exactly as peft does.

Follows `peft.tuners.tuners_utils.check_target_module_exists` and `peft.utils.other.get_pattern_key` of peft 0.21; a
test compares the two.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from adapters.formats.peft.bounded_regex import MAX_PATTERN_LENGTH, Expressions

ALL_LINEAR = "all-linear"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
# A plain name: anchored or not; its dots match any character, escaped ones a dot.
_NAME_IN_PATTERN = re.compile(r"(?P<anchor>\^?)(?P<name>(?:[A-Za-z0-9_.-]|\\[.-])+)\$?")
_DOT = re.compile(r"\\(?P<escaped>.)|\.")
_ANY = "\0"  # stands for any character in a name

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Targets:
    """The fields of a configuration that select the adapted modules."""

    modules: str | tuple[str, ...]  # ALL_LINEAR, a regular expression, or names
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...]  # empty: every layer
    layers_pattern: tuple[str, ...]
    expressions: Expressions
    where: str  # the configuration's name, for messages
    entries: frozenset[str] = field(init=False)  # of a list of modules
    excluded_entries: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for name, value in (("entries", self.modules), ("excluded_entries", self.excluded)):
            object.__setattr__(self, name, frozenset(() if isinstance(value, str) else value))

    def match(self, key: str) -> bool:
        """True if peft would put a LoRA on the module `key`, a linear one inside the decoder layers."""
        return not self.excludes(key) and self._is_named(key)

    def excludes(self, key: str) -> bool:
        if isinstance(self.excluded, str):
            return bool(self.excluded) and self._matches("exclude_modules", self.excluded, key)
        return not self.excluded_entries.isdisjoint(endings(key))

    def _is_named(self, key: str) -> bool:
        if isinstance(self.modules, str):
            return self.modules == ALL_LINEAR or self._matches("target_modules", self.modules, key)
        if key in self.entries:
            return True  # a full name is not subject to layers_to_transform
        return not self.entries.isdisjoint(endings(key)) and (not self.layers or self._layer_of(key) in self.layers)

    def _layer_of(self, key: str) -> int | None:
        if not self.layers_pattern:
            match = _FIRST_INDEX.match(key)
            return int(match["idx"]) if match else None
        found = self.expressions.first_match("layers_pattern", self.layers_pattern, key)
        return int(found[1]["idx"]) if found else None

    def _matches(self, field: str, pattern: str, key: str) -> bool:
        return self.expressions.first_match(field, (pattern,), key) is not None


def names(entry: str, key: str) -> bool:
    """True if an entry of a list of module names names the module `key`."""
    return key == entry or key.endswith(f".{entry}")


def endings(key: str) -> Iterator[str]:
    """All entries of a list of module names that would name the module `key`: itself, and each suffix after a dot."""
    yield key
    at = key.find(".")
    while at >= 0:
        yield key[at + 1 :]
        at = key.find(".", at + 1)


class Patterns(Generic[Value]):
    """`rank_pattern` or `alpha_pattern`: a module has the value of the first pattern that matches its name.

    There may be one per module, so patterns that are plain names are looked up instead of matched in turn.
    """

    def __init__(self, patterns: Mapping[str, Value], field: str, expressions: Expressions) -> None:
        self._values = list(patterns.values())
        self._field, self._expressions = field, expressions
        self._numbers: dict[tuple[bool, str], int] = {}  # (is anchored, name) -> the pattern's number
        # (is anchored, length) -> the positions of _ANY in names of that length
        self._wildcards: dict[tuple[bool, int], dict[tuple[int, ...], None]] = {}
        self._others: list[str] = []
        self._numbers_of_others: list[int] = []
        with expressions.budget:
            for number, pattern in enumerate(patterns):
                if len(pattern) <= MAX_PATTERN_LENGTH and (match := _NAME_IN_PATTERN.fullmatch(pattern)):
                    self._add_name(bool(match["anchor"]), match["name"], number)
                else:
                    self._others.append(pattern)
                    self._numbers_of_others.append(number)

    def _add_name(self, is_anchored: bool, pattern: str, number: int) -> None:
        name = _DOT.sub(lambda dot: dot["escaped"] or _ANY, pattern)
        self._numbers.setdefault((is_anchored, name), number)
        wildcards = tuple(at for at, character in enumerate(name) if character == _ANY)
        self._wildcards.setdefault((is_anchored, len(name)), {})[wildcards] = None

    def value_for(self, key: str, default: Value) -> Value:
        """The value for the module `key`. Raises AdapterMalformed or AdapterUnsupported for a bad expression."""
        with self._expressions.budget:
            number = min(self._numbers_of_names(key), default=len(self._values))
        earlier = islice(self._others, bisect_left(self._numbers_of_others, number))
        if found := self._expressions.first_match(self._field, earlier, key):
            number = self._numbers_of_others[found[0]]
        return self._values[number] if number < len(self._values) else default

    def _numbers_of_names(self, key: str) -> Iterator[int]:
        for is_anchored, ending in [(True, key), *((False, ending) for ending in endings(key))]:
            for wildcards in self._wildcards.get((is_anchored, len(ending)), ()):
                self._expressions.budget.left_s()
                masked = list(ending)
                for at in wildcards:
                    masked[at] = _ANY
                if (number := self._numbers.get((is_anchored, "".join(masked)))) is not None:
                    yield number


def as_targets(value: Any) -> bool:
    """True for a JSON value that may be target_modules or exclude_modules."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
