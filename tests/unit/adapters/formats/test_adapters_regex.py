import random
import re
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from adapters.formats.peft import bounded_regex
from adapters.formats.peft.bounded_regex import BoundedPattern, PatternRefused, compile_bounded

KEYS = [f"model.layers.{n}.{m}" for n in (0, 7, 12) for m in ("self_attn.q_proj", "mlp.up_proj", "mlp.gate_up_proj")]
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|up_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|up_proj)))"
)


@pytest.mark.parametrize(
    "pattern",
    [
        "", "q_proj", ".*q_proj", r".*\.(q|up)_proj", r"model\.layers\.\d+\.mlp\..*", r"^model.*proj$", r"\bmodel.*",
        r".*layers\.(0|7)\..*", r".*layers\.[^07]+\..*", r".*layers\.[0-9]{2}\..*", r"^(?!.*mlp).*proj$",
        ".*(?=q_proj).*", r".*\.layers\.\d{1,2}\.self_attn\.[qkv]_proj", "(.*\\.)?(q_proj)$",
        "(.*\\.)?(a|.*up_proj)$", r"(?:a|b)*.*?_proj", r"(model\.)?layers.*|model.*up_proj", UNSLOTH, r"[\w.]+",
        r".*\Bproj", "(?P<name>.*)proj", r"\Amodel\W.*\Z", r"(.*)*(.*)*proj", "x*y*z*.*", r"(a?){20}model.*",
    ],
)  # fmt: skip
def test_it_matches_as_re_does(pattern):
    for key in [*KEYS, "", "q_proj", "lm_head"]:
        assert compile_bounded(pattern).matches(key) == (re.fullmatch(pattern, key) is not None), key


ATOMS = st.sampled_from(["a", "b", ".", r"\.", r"\d", r"\w", "[ab]", "[^a]", "1", r"\b", "^", "$", "(?=a)", "(?!b)"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{1,2}", "{2}", "{0,1}?"])).map(
            lambda p: f"(?:{p[0]}){p[1]}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(PATTERNS, st.lists(st.text("ab1.", max_size=6), min_size=1, max_size=4))
def test_it_matches_as_re_does_on_random_expressions(pattern, texts):
    try:
        bounded = compile_bounded(pattern)
    except PatternRefused as refusal:
        assert "look-ahead" in str(refusal)  # noqa: PT017
        return
    for text in texts:
        assert bounded.matches(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*b", "(a|a)*b", "(.|.)*X", "(a|aa)+$b", "(.*a){30}b", "((a*)*)*b", "(?:a?){60}" + "a" * 60, "(?=(a+)+b)a*"],
)
def test_expressions_that_explode_in_re_do_not(pattern):
    start = time.thread_time()
    assert not compile_bounded(pattern).matches("a" * 58 + "c")
    assert time.thread_time() - start < 1


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "no valid"), ("*a", "no valid"), ("[z-a]", "no valid"), (r"(a)\1", "not supported"), ("(?i)a", "flags"),
        ("(?<=a)b", "not supported"), ("(a)?(?(1)b|c)", "not supported"), ("(?i:a)b", "flags"),
        ("a{9999}", "too large"), ("((){999}){999}", "too large"), ("a" * 2001, "at most 2000"),
        ("(" * 500 + ")" * 500, "no valid|too deep"), ("(?=a)" * 5, "look-aheads"), ("(?>a)b", "not supported"),
        ("a*+b", "not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(pattern, says):
    with pytest.raises(PatternRefused, match=says):
        compile_bounded(pattern)


@settings(max_examples=300, deadline=None)
@given(st.text("ab.*+?()[]{}|\\^$-,0123=!<:", max_size=25))
def test_no_text_crashes(pattern):
    try:
        compile_bounded(pattern).matches("model.layers.0.self_attn.q_proj")
    except PatternRefused:
        return


def test_what_is_remembered_is_bounded(monkeypatch):
    """Moves of state sets are kept from text to text; a flood of characters does not fill the memory."""
    monkeypatch.setattr(bounded_regex, "_MAX_REMEMBERED", 300)
    pattern = r"(.*a|b.c)\d*(x|yz)+"
    bounded, plain = BoundedPattern(pattern), re.compile(pattern)
    generator = random.Random(1)
    for _ in range(500):
        pieces = ["a", "b", "c", "1", "x", "yz", chr(generator.randrange(300, 9000))]
        text = "".join(generator.choices(pieces, k=6))
        assert bounded.matches(text) == (plain.fullmatch(text) is not None), text
        kept = [following for moves in bounded._moves.values() for following in moves.values()]
        assert sum(1 + len(following) for following in kept) < 300 + 60
    assert bounded._moves
