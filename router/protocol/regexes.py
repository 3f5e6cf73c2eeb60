"""Refuses regular expressions that could stall an engine.

Engines match them byte by byte against every token of the vocabulary, in the loop that also runs all other requests.
The matcher keeps every way in which the text so far can match. `([a-z]+)+` adds one for each letter, which stalled the
loop for good. So a group that repeats and contains repeats must be unambiguous: at each place, the next character
determines which part comes next. Elsewhere, a few ambiguous places are accepted, as in `.*foo`.
"""

from __future__ import annotations

import re
import re._constants as sre  # type: ignore[import-not-found]
import re._parser as sre_parser  # type: ignore[import-not-found]
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

MAX_POSITIONS = 1500  # characters with exact repeats written out
_MAX_COUNT = 10_000  # of a repeat, and of repeats inside each other multiplied
_MAX_COUNT_IN_STRING = 128  # of a repeat: xgrammar fails beyond it, or takes other parts in the midst of the repeat
_MAX_AMBIGUOUS = 32  # places where two parts may come next
_MAX_AMBIGUOUS_COUNTS = 1  # and one of them is a counted repeat
_MAX_FOLLOWERS = 20_000
_MAX_DEPTH = 32
_MAX_PARTS = 4_000

_LAST_BYTE = 255
_ESCAPED = (1 << 32) - 1 | 1 << ord('"') | 1 << ord("\\")
_OTHERS = 1 << 256  # every character beyond the first 256, as one
_EVERY = (_OTHERS << 1) - 1
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d", sre.CATEGORY_NOT_DIGIT: r"\D", sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S", sre.CATEGORY_WORD: r"\w", sre.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip
_LOOP, _COUNTED = 1, 2
_CHARACTERS = (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN, sre.CATEGORY)
_UNKNOWN_GROUP = re.compile(r"\(\?(?!:|<?[=!]|<[A-Za-z]+>)[^:)]{0,8}")
_BARE_BRACKET = re.compile(r"\]|\{(?!\d+(,\d*)?\})")
_BRACKET_IN_CLASS = re.compile(r"\[\^?\]")
_WIDE_ESCAPE = re.compile(r"\\(?:u(?!00[0-7])....|x[89a-fA-F].)")
_UNKNOWN_ESCAPE = re.compile(r"\\[0-9NU]")


class RegexRefused(ValueError):
    """The reason."""


def check_regex(pattern: str) -> None:
    """Raises RegexRefused."""
    _checked(pattern)


def check_regex_of_string(pattern: str) -> int:
    """One that a JSON string must match. Returns its characters with exact repeats written out. Raises RegexRefused.

    Engines write no character that JSON has to escape, unless the pattern can match nothing else. Where it has
    characters other than those of ASCII, they write all of them unescaped.
    """
    checker = _checked(pattern)
    if checker.largest_count > _MAX_COUNT_IN_STRING:
        raise RegexRefused(f"in strings, repeats are counted to at most {_MAX_COUNT_IN_STRING}; use maxLength")
    if pattern.isascii() and pattern.isprintable():
        if wide := _WIDE_ESCAPE.search(pattern.replace(r"\\", "")):
            raise RegexRefused(rf"it has {wide[0]}, which engines repeat wrongly; write the character itself")
        if any(not mask & ~_ESCAPED for mask in checker.masks):
            raise RegexRefused("it requires a quote, a backslash or a control character, which JSON has to escape")
    elif any(mask & _ESCAPED for mask in checker.masks):
        raise RegexRefused(
            r"beside characters other than those of ASCII, it takes quotes, backslashes or control characters, which "
            r'JSON has to escape; write [^"\\\x00-\x1f] in place of . and classes such as [^a]'
        )
    return len(checker.masks)


def _outside_classes(pattern: str) -> str:
    """The pattern without escapes and classes, so that its brackets and bars are those of groups."""
    return re.sub(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", "", pattern, flags=re.DOTALL)


def _checked(pattern: str) -> _Checker:
    if "\0" in pattern:  # xgrammar stops reading there: one that begins so ends the engine, others are cut
        raise RegexRefused("it has a NUL character; write \\x00")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre_parser.parse(re.sub(r"\(\?<(?=\w)", "(?P<", pattern))
        outside = _outside_classes(pattern)
        if unknown := _UNKNOWN_GROUP.search(outside):
            raise RegexRefused(
                f"it has {unknown[0]}; engines know no flags (write both cases, as in [aA]), and groups only as (a), "
                "(?:a) and (?<name>a)"
            )
        checker = _Checker()
        checker.check(parsed)
        if _BARE_BRACKET.search(outside) or _BRACKET_IN_CLASS.search(re.sub(r"\\.", "", pattern, flags=re.DOTALL)):
            raise RegexRefused(r"it has a bracket that stands for itself; write \{, \[ or \]")
        if unknown := _UNKNOWN_ESCAPE.search(pattern.replace(r"\\", "")):
            raise RegexRefused(rf"it has {unknown[0]}, which engines do not know; write \x41 or \u0041")
        return checker
    except (re.error, OverflowError) as error:
        raise RegexRefused(f"it is no valid regular expression ({error})") from None
    except RecursionError:
        raise RegexRefused("it is nested too deeply") from None


@dataclass(slots=True)
class _Part:
    """A part of an expression, with the positions at which it can begin and end: indices of its characters."""

    is_nullable: bool
    first: list[int]
    last: list[int]
    has_loop: bool = False
    count: int = 1  # the largest product of counts of repeats inside each other
    has_start: bool = False  # a ^
    has_end: bool = False  # a $


class _Checker:
    def __init__(self) -> None:
        self.masks: list[int] = []  # of each position: the characters that it accepts, as bits
        self._follow: list[list[tuple[int, int]]] = []  # of each position: those that may come next, and by which way
        self._num_followers = 0
        self._num_parts = 0
        self.largest_count = 0  # of a repeat

    def check(self, parsed: Any) -> None:
        whole = self._sequence(parsed, 0)
        found = [self._ambiguity([(position, 0) for position in whole.first])]
        found += map(self._ambiguity, self._follow)
        if sum(found_one > 0 for found_one in found) > _MAX_AMBIGUOUS:
            raise RegexRefused(f"it is ambiguous at more than {_MAX_AMBIGUOUS} places")
        if sum(found_one == _COUNTED for found_one in found) > _MAX_AMBIGUOUS_COUNTS:
            raise RegexRefused(
                "what follows a counted repeat must begin with a character that the repeat does not take"
            )

    def _ambiguity(self, followers: list[tuple[int, int]]) -> int:
        """0 if every character is taken by at most one of them."""
        taken, counted, worst = 0, 0, 0
        for position, way in followers:
            mask = self.masks[position]
            if mask & taken:
                worst = max(worst, _COUNTED if mask & counted or way == _COUNTED else _LOOP)
            taken |= mask
            if way == _COUNTED:
                counted |= mask
        return worst

    # ---- positions that follow each other -----------------------------------------------------------------------

    def _sequence(self, items: Any, depth: int) -> _Part:
        self._num_parts += 1
        if depth > _MAX_DEPTH or self._num_parts > _MAX_PARTS:
            raise RegexRefused("it is nested too deeply")
        whole = _Part(True, [], [])
        for item in items:
            whole = self._joined(whole, self._part(item, depth))
        return whole

    def _joined(self, left: _Part, right: _Part) -> _Part:
        if (left.last and right.has_start) or (left.has_end and right.first):
            raise RegexRefused("it has a ^ that is not at the start, or a $ that is not at the end; leave it out")
        self._connect(left.last, right.first, 0)
        return _Part(
            left.is_nullable and right.is_nullable,
            left.first + right.first if left.is_nullable else left.first,
            left.last + right.last if right.is_nullable else right.last,
            left.has_loop or right.has_loop,
            max(left.count, right.count),
            left.has_start or right.has_start,
            left.has_end or right.has_end,
        )

    def _connect(self, last: list[int], first: list[int], way: int) -> None:
        self._num_followers += len(last) * len(first)
        if self._num_followers > _MAX_FOLLOWERS:
            raise RegexRefused("it has too many optional parts after each other")
        for position in last:
            self._follow[position] += ((each, way) for each in first)

    def _part(self, item: Any, depth: int) -> _Part:
        kind, value = item
        if kind in _CHARACTERS:
            return self._character(item)
        if kind is sre.SUBPATTERN:
            return self._sequence(value[3], depth + 1)
        if kind is sre.BRANCH:
            parts = [self._sequence(branch, depth + 1) for branch in value[1]]
            return _Part(
                any(part.is_nullable for part in parts),
                [position for part in parts for position in part.first],
                [position for part in parts for position in part.last],
                any(part.has_loop for part in parts),
                max(part.count for part in parts),
                any(part.has_start for part in parts),
                any(part.has_end for part in parts),
            )
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, body = value
            return self._repeat(least, most, body, depth)
        if kind is sre.AT and value in (sre.AT_BEGINNING, sre.AT_END):
            return _Part(True, [], [], has_start=value is sre.AT_BEGINNING, has_end=value is sre.AT_END)
        raise RegexRefused(
            "it has look-around, a back reference, a word boundary or another construct that is not served"
        )

    def _character(self, item: Any) -> _Part:
        position = len(self.masks)
        if position >= MAX_POSITIONS:
            raise RegexRefused(f"it has more than {MAX_POSITIONS} characters when its repeats are written out")
        self.masks.append(_mask(item))
        self._follow.append([])
        return _Part(False, [position], [position])

    def _repeat(self, least: int, most: int, body: Any, depth: int) -> _Part:
        is_endless = most is sre.MAXREPEAT
        if max(least, 0 if is_endless else most) > _MAX_COUNT:
            raise RegexRefused(f"a repeat is counted to more than {_MAX_COUNT}")
        self.largest_count = max(self.largest_count, least if is_endless else most)
        if least == most and most <= 64:
            whole = _Part(True, [], [])
            for _ in range(most):
                whole = self._joined(whole, self._sequence(body, depth + 1))
            return whole
        begins_at = len(self.masks)
        part = self._sequence(body, depth + 1)
        part.is_nullable = part.is_nullable or least == 0
        if not is_endless and most <= 1:
            return part
        if part.last and (part.has_start or part.has_end):
            raise RegexRefused("a group that repeats has a ^ or $; leave it out")
        if not is_endless:
            part.count *= most
            if part.count > _MAX_COUNT:
                raise RegexRefused(f"repeats inside each other are counted to more than {_MAX_COUNT}")
        had_loop, is_nullable = part.has_loop, part.is_nullable and least > 0
        self._connect(part.last, part.first, _LOOP if is_endless else _COUNTED)
        part.has_loop = True
        if had_loop:
            inside = range(begins_at, len(self.masks))
            followers = [[(position, 0) for position in part.first], *(self._follow[each] for each in inside)]
            if is_nullable or any(map(self._ambiguity, followers)):
                raise RegexRefused(
                    "a group that repeats has a repeat inside, and where one round ends and the next begins is "
                    "ambiguous, as in ([a-z]+)+; separate the rounds, as in ([a-z]+,)*"
                )
        return part


@cache
def _category_mask(category: Any) -> int:
    """Engines mean ASCII: everything else is in the negative categories."""
    matches = re.compile(_CATEGORIES[category]).match
    mask = sum(1 << n for n in range(128) if matches(chr(n)))
    is_negative = category in (sre.CATEGORY_NOT_DIGIT, sre.CATEGORY_NOT_SPACE, sre.CATEGORY_NOT_WORD)
    return mask | _EVERY & ~((1 << 128) - 1) if is_negative else mask


def _mask(item: Any) -> int:
    """The characters that a part accepts, as bits."""
    kind, value = item
    if kind is sre.LITERAL:
        return 1 << value if value <= _LAST_BYTE else _OTHERS
    if kind is sre.NOT_LITERAL:
        return _EVERY & ~(1 << value) if value <= _LAST_BYTE else _EVERY
    if kind is sre.ANY:
        return _EVERY & ~(1 << ord("\n"))
    if kind is sre.RANGE:
        low, high = value
        within = ((1 << (min(high, _LAST_BYTE) + 1)) - 1) & ~((1 << low) - 1) if low <= _LAST_BYTE else 0
        return within | (_OTHERS if high > _LAST_BYTE else 0)
    if kind is sre.CATEGORY:
        return _category_mask(value)
    mask, is_negated = 0, False
    for each in value:
        if each[0] is sre.NEGATE:
            is_negated = True
        else:
            mask |= _mask(each)
    return (_EVERY & ~mask) | _OTHERS if is_negated else mask
