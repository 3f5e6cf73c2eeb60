"""Match the regular expressions of a PEFT configuration within bounds on CPU time and memory.

peft matches with `re`, which can backtrack for years. `regex` backtracks too, but has a timeout and releases the GIL.
Both must mean the same by an expression, so only constructs on which they agree are accepted.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import regex

from adapters.errors import AdapterMalformed, AdapterUnsupported

MAX_PATTERN_LENGTH = 2000
_MAX_DEPTH = 50
_MAX_SIZE = 2000  # characters and groups of one expression with its repeats written out, as `regex` compiles them
_MAX_TOTAL_SIZE = 32_000  # of all expressions of one configuration
_MAX_EXPRESSIONS = 512
_MAX_CPU_S = 3.0  # of one configuration; 20,000 modules of experts take half a second on a fast machine

# The expression that peft builds, by field of adapter_config.json.
_FORMS = {
    "target_modules": r"(?:{})\Z",
    "exclude_modules": r"(?:{})\Z",
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}
_TOKEN = re.compile(
    r"""
    (?P<open> \( (?: \?: | \?= | \?! | \?P<\w+> | (?!\?) ) )
  | (?P<close> \) )
  | (?P<repeat> (?: [*?] | (?P<plus>\+) | \{ (?=,?\d) (?P<least>\d*) (?P<comma>,?) (?P<most>\d*) \} ) \?? (?!\+) )
  | (?P<other> \\ (?: [AZbBdDsSwW] | [^A-Za-z0-9] )
    | \[ \^?+ \]?+ (?: \\ (?: [dDsSwW] | [^A-Za-z0-9] ) | (?! --|&&|~~|\|\| ) [^][\\] )*+ \]
    | [^][\\(){}*+?] )
    """,
    re.VERBOSE | re.DOTALL,
)


class PatternRefused(ValueError):
    """The expression is too large or uses an unsupported construct."""


class PatternInvalid(PatternRefused):
    """It is no regular expression."""


class CpuBudget:
    """CPU time that one configuration may take from the thread that reads it, spent in `with` blocks."""

    def __init__(self, where: str, seconds: float = _MAX_CPU_S) -> None:
        self._where, self._seconds = where, seconds
        self._left_s = seconds  # at the start of the current block
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._left_s -= time.thread_time() - self._began_s

    def left_s(self) -> float:
        """The time that is left. Raises AdapterMalformed if there is none."""
        left_s = self._left_s - (time.thread_time() - self._began_s)
        if left_s <= 0:
            raise self.exceeded()
        return left_s

    def exceeded(self) -> AdapterMalformed:
        return AdapterMalformed(
            f"{self._where}: its module names and regular expressions take over {self._seconds} s of CPU time; use "
            "fewer, or plain names"
        )


class Expressions:
    """The expressions of one configuration. Each is compiled on first use and lives as long as this object."""

    def __init__(self, where: str) -> None:
        self.budget = CpuBudget(where)
        self._where = where
        self._compiled: dict[tuple[str, str], regex.Pattern[str]] = {}
        self._total_size = 0

    def first_match(self, field: str, patterns: Iterable[str], key: str) -> tuple[int, regex.Match[str]] | None:
        """Match the module name `key` as peft does; return the index of the first pattern that matches, and the match.

        `key` must not be empty: `re` and `regex` differ about \\B there. Raises AdapterMalformed and AdapterUnsupported
        with the reason.
        """
        with self.budget:
            for index, pattern in enumerate(patterns):
                compiled = self._compiled.get((field, pattern)) or self._compile(field, pattern)
                try:  # `timeout` counts CPU time of the whole process, so it can only be too early
                    match = compiled.match(key, timeout=self.budget.left_s())
                except TimeoutError:
                    raise self.budget.exceeded() from None
                if match:
                    return index, match
        return None

    def _compile(self, field: str, pattern: str) -> regex.Pattern[str]:
        try:
            self._total_size += size_of(pattern)
            if len(self._compiled) >= _MAX_EXPRESSIONS or self._total_size > _MAX_TOTAL_SIZE:
                raise PatternRefused("with those before it there are too many; use fewer, or plain names")
            compiled = regex.compile(_FORMS[field].format(pattern), regex.VERSION0, cache_pattern=False)
        except (PatternRefused, regex.error, RecursionError) as error:
            kind = AdapterMalformed if isinstance(error, PatternInvalid) else AdapterUnsupported
            raise kind(
                f"{self._where}: {field}: the regular expression {pattern[:80]!r} is refused: {error}"
            ) from error
        finally:
            regex.purge()  # it keeps the text of uncached expressions, too
        self._compiled[field, pattern] = compiled
        return compiled


def size_of(pattern: str) -> int:
    """Characters and groups of an expression with its repeats written out. Raises PatternRefused with the reason."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PatternRefused(f"it has {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are accepted")
    if not pattern.isascii():
        raise PatternRefused("it has characters outside ASCII, which are not supported")
    at = size = last = 0  # `last`: the size of the part that a repeat applies to
    outer: list[int] = []  # for each open group: the size before it
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise PatternRefused(
                f"{pattern[at : at + 4]!r} at position {at} is not supported: no flags, look-behind, back references, "
                "conditions, atomic groups, possessive repeats, or braces and brackets that are not escaped"
            )
        if token.lastgroup == "open":
            outer.append(size)
            size = 1
        elif token.lastgroup == "close" and outer:
            last = size
            size += outer.pop()
        elif token.lastgroup == "repeat":
            size += last * (_num_copies(token) - 1)
        else:
            last = token.end() - at
            size += last
        if size > _MAX_SIZE:
            raise PatternRefused("its repetitions make it too large")
        if len(outer) > _MAX_DEPTH:
            raise PatternRefused("it is nested too deeply")
        at = token.end()
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternInvalid(f"it is no valid regular expression ({error})") from error
    return size


def _num_copies(repeat: re.Match[str]) -> int:
    """How often `regex` compiles the repeated part: as often as it must occur, and once for a loop."""
    least = 1 if repeat["plus"] else int(repeat["least"] or 0)
    is_exact = repeat["least"] is not None and not (repeat["comma"] and repeat["most"] != repeat["least"])
    return max(1, least + (not is_exact))
