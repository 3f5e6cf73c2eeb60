"""Regular expressions from strangers, matched in bounded time.

PEFT configurations carry regular expressions. Python's `re` backtracks and can be made to run for years, so an
expression is parsed by `re` and then matched by walking all its states at once, in time states x length. What that
cannot do exactly as `re` does it (back references, look-behind, flags) is refused. Only whether it matches is asked,
so greed does not matter.
"""

from __future__ import annotations

import re
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MAX_PATTERN_LENGTH = 2000
_MAX_STATES = 1000
_MAX_STEPS = 20_000  # of compilation
_MAX_LOOK_AHEADS = 4
_MAX_REMEMBERED = 500_000  # moves, and states in them, of one expression
Looked = dict[tuple[int, int], bool]  # (a look-ahead's first state, index) -> whether it found, for one text
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.-]*\$?")


class PatternRefused(ValueError):
    """The expression is invalid, too large, or uses what is not supported."""


@lru_cache(maxsize=4096)
def compile_bounded(pattern: str) -> BoundedPattern:
    """Compiles an expression. Raises PatternRefused with the reason."""
    return BoundedPattern(pattern)


class BoundedPattern:
    """A compiled expression. `matches` is `re.fullmatch(pattern, text) is not None`."""

    def __init__(self, pattern: str):
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise PatternRefused(f"it has {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are accepted")
        self._plain = re.compile(pattern) if _PLAIN.fullmatch(pattern) else None
        # Per state: the edges that take one character, (test, target), and those that take none, (condition, target).
        self._edges: list[list[tuple[Any, int]]] = []
        self._skips: list[list[tuple[Any, int]]] = []
        self._steps = self._look_aheads = 0
        self._depends_on_position = False
        # What each character makes of a set of states: tens of thousands of texts ask the same.
        self._moves: dict[frozenset[int], dict[str, frozenset[int]]] = {}
        self._num_remembered = 0
        if self._plain is None:
            try:
                tree = parser.parse(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise PatternRefused(f"it is no valid regular expression ({error})") from error
            if tree.state.flags & ~re.UNICODE.value:
                raise PatternRefused("it sets flags, which are not supported")
            self._start = self._state()
            try:
                self._end = self._add(tree, self._start)
            except RecursionError as error:
                raise PatternRefused("it is nested too deeply") from error
            if not self._depends_on_position:
                self._first = frozenset(self._closure("", 0, {self._start}, {}))

    def matches(self, text: str) -> bool:
        """True where the whole text matches."""
        if self._plain is not None:
            return self._plain.fullmatch(text) is not None
        if self._depends_on_position:
            return len(text) in self._run(text, 0, self._start, self._end, {})
        current = self._first
        for character in text:
            known = self._moves.setdefault(current, {})
            if (following := known.get(character)) is None:
                if self._num_remembered >= _MAX_REMEMBERED:
                    self._moves, self._num_remembered = {}, 0
                    known = self._moves.setdefault(current, {})
                reached = {target for state in current for test, target in self._edges[state] if test(character)}
                known[character] = following = frozenset(self._closure("", 0, reached, {}))
                self._num_remembered += 1 + len(following)
            current = following
        return self._end in current

    def _run(self, text: str, index: int, start: int, end: int, looked: Looked) -> set[int]:
        """The indices at which a match from `index` can end."""
        ends: set[int] = set()
        current = self._closure(text, index, {start}, looked)
        while current:
            if end in current:
                ends.add(index)
            if index == len(text):
                break
            following = {target for state in current for test, target in self._edges[state] if test(text[index])}
            index += 1
            current = self._closure(text, index, following, looked)
        return ends

    def _closure(self, text: str, index: int, states: set[int], looked: Looked) -> set[int]:
        pending, reached = list(states), set(states)
        while pending:
            for condition, target in self._skips[pending.pop()]:
                if target not in reached and (condition is None or condition(text, index, looked)):
                    reached.add(target)
                    pending.append(target)
        return reached

    def _state(self) -> int:
        if len(self._edges) >= _MAX_STATES:
            raise PatternRefused("its repetitions make it too large")
        self._edges.append([])
        self._skips.append([])
        return len(self._edges) - 1

    def _skip(self, source: int, target: int, condition: Any = None) -> None:
        self._depends_on_position = self._depends_on_position or condition is not None
        self._skips[source].append((condition, target))

    def _add(self, tree: Any, start: int) -> int:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise PatternRefused("its repetitions make it too large")
        for code, argument in tree:
            start = self._add_node(code, argument, start)
        return start

    def _add_node(self, code: Any, argument: Any, start: int) -> int:
        if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            end = self._state()
            self._edges[start].append((_character_test(code, argument), end))
            return end
        if code is op.SUBPATTERN:
            _, add_flags, remove_flags, tree = argument
            if add_flags or remove_flags:
                raise PatternRefused("it sets flags, which are not supported")
            return self._add(tree, start)
        if code is op.BRANCH:
            end = self._state()
            for tree in argument[1]:
                branch = self._state()
                self._skip(start, branch)
                self._skip(self._add(tree, branch), end)
            return end
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._add_repeat(argument, start)
        if code is op.AT:
            end = self._state()
            self._skip(start, end, _position_test(argument))
            return end
        if code in (op.ASSERT, op.ASSERT_NOT) and argument[0] == 1:
            self._look_aheads += 1
            if self._look_aheads > _MAX_LOOK_AHEADS:
                raise PatternRefused(f"it has more than {_MAX_LOOK_AHEADS} look-aheads")
            first, end = self._state(), self._state()
            last, wanted = self._add(argument[1], first), code is op.ASSERT
            self._skip(start, end, lambda text, index, looked: self._looks(text, index, first, last, looked) is wanted)
            return end
        raise PatternRefused(f"it uses {str(code).lower().replace('_', ' ')}, which is not supported")

    def _looks(self, text: str, index: int, first: int, last: int, looked: Looked) -> bool:
        if (first, index) not in looked:
            looked[first, index] = bool(self._run(text, index, first, last, looked))
        return looked[first, index]

    def _add_repeat(self, argument: Any, start: int) -> int:
        minimum, maximum, tree = argument
        for _ in range(minimum):
            start = self._add(tree, start)
        end = self._state()
        self._skip(start, end)
        if maximum is op.MAXREPEAT:
            loop = self._state()
            self._skip(start, loop)
            last = self._add(tree, loop)
            self._skip(last, loop)
            self._skip(last, end)
            return end
        for _ in range(maximum - minimum):
            start = self._add(tree, start)
            self._skip(start, end)
        return end


def _character_test(code: Any, argument: Any) -> Any:
    if code is op.ANY:
        return lambda character: character != "\n"
    if code is op.LITERAL:
        return lambda character: ord(character) == argument
    if code is op.NOT_LITERAL:
        return lambda character: ord(character) != argument
    negated = argument[0][0] is op.NEGATE
    tests = [_set_test(*item) for item in argument[1 if negated else 0 :]]
    return lambda character: any(test(character) for test in tests) is not negated


def _set_test(code: Any, argument: Any) -> Any:
    if code is op.LITERAL:
        return lambda character: ord(character) == argument
    if code is op.RANGE:
        return lambda character: argument[0] <= ord(character) <= argument[1]
    if code is op.CATEGORY:
        category = {
            op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D", op.CATEGORY_WORD: r"\w",
            op.CATEGORY_NOT_WORD: r"\W", op.CATEGORY_SPACE: r"\s", op.CATEGORY_NOT_SPACE: r"\S",
        }[argument]  # fmt: skip
        return re.compile(category).match
    raise PatternRefused(f"it uses {str(code).lower()}, which is not supported")


def _position_test(where: Any) -> Any:
    position = {
        op.AT_BEGINNING: "^", op.AT_BEGINNING_STRING: r"\A", op.AT_END: "$", op.AT_END_STRING: r"\Z",
        op.AT_BOUNDARY: r"\b", op.AT_NON_BOUNDARY: r"\B",
    }[where]  # fmt: skip
    compiled = re.compile(position)
    # `pos` would move the beginning of the text, so the position is looked for in the text before and after it.
    if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
        return lambda text, index, looked: index == 0
    return lambda text, index, looked: compiled.match(text, index) is not None
