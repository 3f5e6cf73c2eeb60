"""Regular expressions that could occupy an engine are refused, and those that people write are not."""

from __future__ import annotations

import pytest
from support.calls import Calls

from router.protocol.regexes import RegexRefused, check_regex

SERVED = (
    "", "[a-z]+", "[a-z]{1,100}", "(yes|no|maybe)", "(cat|car)+", ".*foo", "(a|b|c){1,50}", r"\d{4}-\d{2}-\d{2}",
    "([0-9A-F]{2}){6}", "([0-9A-F]{2}:){5}[0-9A-F]{2}", r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,8}$",
    r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)", "([a-z]+,)*", '"[^"]*"(, "[^"]*")*',
    r"\w+( \w+){0,4}", r"(\w+\s)*", r"- .+(\n- .+)*", "(?:(?:ab+c)|d)*e", "(?<year>[0-9]{4})", r"\(?[0-9]{3}\)?",
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2}(\.\d+)?)?Z", "[^,]*(,[^,]*){3}", "é+", "[à-ü]*", "[(?i)]",
)  # fmt: skip
# What each did was measured with xgrammar and a vocabulary of 128,000: a step took 0.2 s or did not end.
REFUSED = {
    "([a-z]+)+": "ambiguous",
    "((([a-z]+)+)+)+b": "ambiguous",
    "([a-z]*)*": "ambiguous",
    "([a-z]+ ?)*": "ambiguous",
    "([a-z]{1,100}){1,100}": "ambiguous",
    "(([a-z]{1,10}){1,10}){1,10}": "ambiguous",
    "([a-z]{1,9}a|[a-z]{1,9}b)*": "ambiguous",
    "[a-z]{0,9}" * 20: "counted repeat",
    "[a-z]?" * 60: "ambiguous at more than",
    "[a-z]{1,1000000}": "counted to more than",
    "([a-z]{1,1000},){1,1000}": "counted to more than",
    "a{64}" * 100: "more than 1500 characters",
    "(" * 60 + "a" + ")" * 60: "nested",
    "(" * 5000: "nested|no valid",
    "(?=a)b": "look-around",
    r"(a)\1": "back reference",
    r"\bword": "word boundary",
    "(?P<x>a)": r"\(\?P<x>a; engines know",
    "(?i)a": r"\(\?i; engines know",
    "a(?i:b)": r"\(\?i; engines know",
    "(?#why)a": "engines know",
    "(": "no valid",
    "a{3,1}": "no valid",
    "a$b": "not at the end",
    "a^b": "not at the start",
    "(a$)*": "repeats has a",
    "a{2, 3}": "stands for itself",
    "[]a]": "stands for itself",
    "a]": "stands for itself",
    r"\101": "do not know",
    r"\U00000041": "do not know",
    "(?<n1>a)": "engines know",
    "(()|()){64}" * 80: "nested",
    "\0": "NUL",  # one that begins so ended the engine's scheduler
    "\0a": "NUL",
    "a\0b": "NUL",  # and of this one xgrammar read the a alone
}


@pytest.mark.parametrize("pattern", SERVED)
def test_served(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize("pattern", REFUSED)
def test_refused(pattern: str) -> None:
    with pytest.raises(RegexRefused, match=REFUSED[pattern]), Calls(builtins=True) as calls:
        check_regex(pattern)
    assert calls.number < 100_000
