"""Regular expressions that could occupy an engine are refused, and those that people write are not."""

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
    "ambiguous": (
        "([a-z]+)+", "((([a-z]+)+)+)+b", "([a-z]*)*", "([a-z]+ ?)*", "([a-z]{1,100}){1,100}",
        "(([a-z]{1,10}){1,10}){1,10}", "([a-z]{1,9}a|[a-z]{1,9}b)*",
    ),
    "ambiguous at more than": ("[a-z]?" * 60,),
    "counted repeat": ("[a-z]{0,9}" * 20,),
    "counted to more than": ("[a-z]{1,1000000}", "([a-z]{1,1000},){1,1000}"),
    "more than 1500 characters": ("a{64}" * 100,),
    "nested": ("(" * 60 + "a" + ")" * 60, "(()|()){64}" * 80),
    "nested|no valid": ("(" * 5000,),
    "look-around": ("(?=a)b",),
    "back reference": (r"(a)\1",),
    "word boundary": (r"\bword",),
    r"\(\?P<x>a; engines know": ("(?P<x>a)",),
    r"\(\?i; engines know": ("(?i)a", "a(?i:b)"),
    "engines know": ("(?#why)a", "(?<n1>a)"),
    "no valid": ("(", "a{3,1}"),
    "not at the end": ("a$b",),
    "not at the start": ("a^b",),
    "repeats has a": ("(a$)*",),
    "stands for itself": ("a{2, 3}", "[]a]", "a]"),
    "do not know": (r"\101", r"\U00000041"),
    "NUL": ("\0", "\0a", "a\0b"),  # the first ended the engine's scheduler; of the last xgrammar read the a alone
}  # fmt: skip


@pytest.mark.parametrize("pattern", SERVED)
def test_served(pattern: str) -> None:
    check_regex(pattern)


@pytest.mark.parametrize(("why", "pattern"), [(why, each) for why, patterns in REFUSED.items() for each in patterns])
def test_refused(why: str, pattern: str) -> None:
    with pytest.raises(RegexRefused, match=why), Calls(builtins=True) as calls:
        check_regex(pattern)
    assert calls.number < 100_000
