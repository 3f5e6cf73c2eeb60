"""Expressions of a PEFT configuration match as in `re`, which peft uses, or are refused; their cost is bounded."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.adapters.random_adapters import write_random_lora
from support.adapters.tiny_model import write_model_config

from adapters.errors import AdapterError, AdapterMalformed, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.formats.peft.bounded_regex import Expressions, PatternRefused, size_of
from adapters.model.base_model import BaseModel

KEYS = [f"model.layers.{n}.{m}" for n in (0, 7, 12) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate_up_proj")]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|up_proj)))"
)
# By field: how peft matches its expressions.
AS_PEFT: dict[str, Callable[[str, str], re.Match[str] | None]] = {
    "target_modules": re.fullmatch,
    "rank_pattern": lambda pattern, key: re.match(rf"(.*\.)?({pattern})$", key),
}


def matches(pattern: str, key: str, field: str = "target_modules") -> bool:
    return Expressions("test").first_match(field, [pattern], key) is not None


@pytest.mark.parametrize("field", AS_PEFT)
@pytest.mark.parametrize(
    "pattern",
    [
        "", "q_proj", ".*q_proj", r".*\.(q|up)_proj", r"model\.layers\.\d+\.mlp\..*", r"^model.*proj$", r"\bmodel.*",
        r".*layers\.(0|7)\..*", r".*layers\.[^07]+\..*", r".*layers\.[0-9]{2}\..*", r"^(?!.*mlp).*proj$",
        ".*(?=q_proj).*", r".*\.layers\.\d{1,2}\.self_attn\.[qkv]_proj", "(.*\\.)?(q_proj)$",
        "(.*\\.)?(a|.*up_proj)$", r"(?:a|b)*.*?_proj", r"(model\.)?layers.*|model.*up_proj", UNSLOTH, r"[\w.]+",
        r".*\Bproj", "(?P<name>.*)proj", r"\Amodel\W.*\Z", r"(.*)*(.*)*proj", "x*y*z*.*", r"(a?){20}model.*",
        "(?=.*mlp)(?=.*up)(?=.*12)(?!.*gate)(?!.*attn).*", "[]q]_proj", "[^]]*", "(q_pro){,3}j",
        r"self_attn\.q[_-]proj",
    ],
)  # fmt: skip
def test_it_matches_as_re_does(pattern, field):
    for key in [*KEYS, "", "q_proj", "lm_head"]:
        assert matches(pattern, key, field) == (AS_PEFT[field](pattern, key) is not None), key


ATOMS = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "1", r"\b", "^", "$", "(?=a)", "(?!b)", "", r"\W", "[]a]",
     "[^]b-]", "(?=.*b)", r"\Z", "_", r"\]"]
)  # fmt: skip
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(st.sampled_from(["(", "(?=", "(?!"]), inner).map(lambda parts: f"{parts[0]}{parts[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{1,2}", "{2}", "{0,1}?", "{,2}", "{2,}", "{0}"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=600)
@given(PATTERNS, st.lists(st.text("ab1._-", max_size=6), min_size=1, max_size=4), st.sampled_from(sorted(AS_PEFT)))
@pytest.mark.slow
def test_it_matches_as_re_does_on_random_expressions(pattern, texts, field):
    for text in texts:
        assert matches(pattern, text, field) == (AS_PEFT[field](pattern, text) is not None)


@settings(max_examples=500)
@given(st.text("ab.*+?()[]{}|\\^$-,0123=!<:&~", max_size=25))
def test_any_text_matches_as_in_re_or_is_refused(pattern):
    try:
        found = matches(pattern, "ab.1a")
    except AdapterError:
        return
    assert found == (re.fullmatch(pattern, "ab.1a") is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*b", "(a|a)*b", "(.|.)*X", "(a|aa)+$b", "(.*a){30}b", "((a*)*)*b", "(?:a?){60}" + "a" * 60, "(?=(a+)+b)a*"],
)
@pytest.mark.slow
def test_expressions_that_explode_in_re_do_not(pattern):
    start = time.thread_time()
    try:
        assert not matches(pattern, "a" * 58 + "c")
    except AdapterMalformed as error:
        assert "CPU time" in str(error)  # noqa: PT017
    assert time.thread_time() - start < 4


@pytest.mark.slow
def test_one_budget_for_all_expressions():
    expressions = Expressions("adapter_config.json")
    start = time.thread_time()
    with pytest.raises(AdapterMalformed, match=r"adapter_config.json: .* take over 3\.0 s of CPU time"):
        expressions.first_match("target_modules", ["(a|aa)+[bd]"], "a" * 58 + "c")
    for _ in range(100):
        with pytest.raises(AdapterMalformed, match="CPU time"):
            expressions.first_match("rank_pattern", ["(a|aa)+[bd]"], "a" * 58 + "c")
    assert time.thread_time() - start < 4


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "no valid"), ("*a", "no valid"), ("[z-a]", "no valid"), ("a**", "no valid"), ("^*", "no valid"),
        ("a)|(b", "no valid"), ("(?P<a>.)(?P<a>.)", "no valid"),
        (r"(a)\1", "not supported"), ("(?i)a", "flags"), ("(?i:a)b", "flags"), ("(?V1)a", "flags"),
        ("(?<=a)b", "not supported"), ("(a)?(?(1)b|c)", "not supported"), ("(?>a)b", "not supported"),
        ("a*+b", "not supported"), ("(?|a|b)", "not supported"), ("(?R)?a", "not supported"),
        ("(?:a){e<=1}", "not supported"), ("a{}", "not supported"), ("a{,}", "not supported"),
        ("[[a]", "not supported"), ("[a--b]", "not supported"), ("[^]||", "not supported"), ("]", "not supported"),
        (r"\p{L}", "not supported"), (r"\m", "not supported"), ("(*FAIL)", "no valid"),
        ("[", "not supported"), ("a\\", "not supported"), ("\u00e9", "outside ASCII"), ("[a\u4e00]", "outside ASCII"),
        ("a{9999}", "too large"), ("((){999}){999}", "too large"), ("(((a{1000}){1000}){1000})", "too large"),
        ("(?:" * 40 + "a" + ")+" * 40, "too large"), ("(?:" * 40 + "a" + "){1,2}" * 40, "too large"),
        ("a" * 2001, "at most 2000"), ("(" * 500 + ")" * 500, "too deep"),
    ],
)  # fmt: skip
def test_what_is_refused(pattern, says):
    with pytest.raises(PatternRefused, match=says):
        size_of(pattern)
    with pytest.raises(AdapterMalformed if "no valid" in says else AdapterUnsupported, match=says):
        matches(pattern, "a")


def test_repeats_count_as_often_as_regex_writes_them_out():
    for pattern, size in {
        "abc": 3, "a*b": 2, "a+b": 3, "(ab){3}": 9, "(ab){3,}": 12, "(ab){3,9}": 12, "(ab){,9}": 3, "a{0}": 1,
        "(?:a{4}){5}": 25, r"\d[abc]": 7, "(a|b)?": 4,
    }.items():  # fmt: skip
        assert size_of(pattern) == size, pattern


# Configurations that cost most, as a part of adapter_config.json. The entries of a pattern have no common beginning.
def _filled(entry: Callable[[int], str], num_bytes: int) -> dict[str, int]:
    """As many entries as fit."""
    entries: dict[str, int] = {}
    for number in itertools.count():
        text = entry(number)
        num_bytes -= len(json.dumps(text)) + len(": 8, ")
        if num_bytes < 0:
            return entries
        entries[text] = 8
    raise AssertionError("unreachable")


def _names_with_holes(number: int) -> str:
    """A name whose length is a key's, with dots at places that no other name has them at."""
    letters = list("layers.79.self_attn.q_proj")
    for place in random.Random(number).sample(range(len(letters)), 9):
        letters[place] = "."
    return "".join(letters)


ENTRIES: dict[str, Callable[[int], str]] = {
    "many positions": lambda n: f".*a.{{{n % 90}}}x{n}",
    "nested repeats": lambda n: f"(.{{44}}){{44}}{n}",
    "backtracking": lambda n: rf"(\w|\w\w|\.)*[{n}!]",
    "options": lambda n: f"(.?){{90}}[{n}!]",
    "many groups": lambda n: f"[ab]{n}" + "(a|b)" * 390,
    "names": lambda n: f"x{n}",
    "anchored names": lambda n: f"^x{n}$",
    "names with holes": _names_with_holes,
}
KIB_4, MIB_1 = 3400, 2**20 - 2000  # beside the other fields


def _pattern(name: str, num_bytes: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"rank_pattern": _filled(ENTRIES[name], num_bytes)}


def _options_in_two_fields() -> dict[str, Any]:
    half = _filled(ENTRIES["options"], MIB_1 // 2)
    return {"rank_pattern": half, "alpha_pattern": half}


def _layers_pattern(pattern: list[str] | str) -> dict[str, Any]:
    return {"layers_to_transform": [0], "layers_pattern": pattern}


COSTLY: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"4 KiB of {name}": _pattern(name, KIB_4) for name in ENTRIES},
    **{f"1 MiB of {name}": _pattern(name, MIB_1) for name in ENTRIES},
    "1 MiB of options in two fields": _options_in_two_fields,
    "1 MiB in one name": lambda: {"rank_pattern": {"x" * MIB_1: 8}},
    "layers_pattern with many names": lambda: _layers_pattern(list(_filled(ENTRIES["names"], MIB_1))),
    "layers_pattern with one long name": lambda: _layers_pattern("." * MIB_1),
    "nested repeats as target_modules": lambda: {"target_modules": "(((a{1000}){1000}){1000})"},
    "2^100 copies as target_modules": lambda: {"target_modules": "(?:" * 100 + "a" + "){1,2}" * 100},
    "a long expression as target_modules": lambda: {"target_modules": "(a|b)" * (MIB_1 // 5)},
    "backtracking as exclude_modules": lambda: {"exclude_modules": r"(\w|\w\w|\.)*[0-9!]"},
}
SOME_COSTLY = (
    "4 KiB of nested repeats",
    "1 MiB of backtracking",
    "1 MiB of many groups",
    "1 MiB of names",
    "2^100 copies as target_modules",
)


def _measure(folder: Path, names: Collection[str]) -> None:
    """Read these costly configurations, and print what each cost: run in a process of its own."""
    base = BaseModel.read(
        write_model_config(folder / "model", hidden_size=8, intermediate_size=8, num_hidden_layers=80)
    )
    lora = write_random_lora(folder / "lora", base, 1, rank=8)
    fields = json.loads((lora / "adapter_config.json").read_text())
    read_adapter(lora, base, Limits())
    for name in names:
        text = json.dumps(fields | COSTLY[name]())
        assert len(text) <= 2**20
        (lora / "adapter_config.json").write_text(text)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, start, answer = _memory_mib("VmRSS"), time.thread_time(), "read"
        try:
            read_adapter(lora, base, Limits())
        except AdapterError as error:
            answer = f"{type(error).__name__}: {error}"
        seconds = time.thread_time() - start
        used = {"peak_mib": _memory_mib("VmHWM") - before, "kept_mib": _memory_mib("VmRSS") - before}
        print(json.dumps({"name": name, "seconds": seconds, **used, "answer": answer}), flush=True)


def _memory_mib(kind: str) -> float:
    """Of this process, as the kernel counts it."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(SOME_COSTLY, id="some"),
        pytest.param(tuple(COSTLY), id="all", marks=pytest.mark.long),
    ],
)
def test_the_most_costly_configurations_cost_little(tmp_path: Path, names: Collection[str]) -> None:
    tests = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert measured.keys() == set(names)
    for name, each in measured.items():
        used = f"{each['seconds']:.2f} s, at most {each['peak_mib']:.1f} MiB, kept {each['kept_mib']:.1f} MiB"
        print(f"{name}: {used}, {each['answer'][:160]}")
    assert all(each["seconds"] < 4 for each in measured.values())
    assert all(each["peak_mib"] < 64 for each in measured.values())
    assert sum(each["kept_mib"] for each in measured.values()) < 64
    for name, each in measured.items():
        error, _, reason = each["answer"].partition(": ")
        if name in ("1 MiB of names", "1 MiB of anchored names"):
            assert error == "read"
        elif error != "read":
            assert error in ("AdapterMalformed", "AdapterUnsupported")
            assert "CPU time" in reason or "is refused: " in reason, each
    assert sum(each["answer"] == "read" for each in measured.values()) < len(measured) / 2  # else nothing was bounded


if __name__ == "__main__":
    _measure(Path(sys.argv[1]), sys.argv[2:])
