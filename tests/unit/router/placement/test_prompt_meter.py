"""The size of prompts, estimated from their bytes, and the demand for revisions, by which homes grow and shrink."""

import msgspec
import pytest

from router.placement import request
from router.placement.request import Demand, PromptMeter
from router.protocol.request_body import Fields


def fields(**values: object) -> Fields:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}


def chat(text: str, **more: object) -> Fields:
    return fields(messages=[{"role": "user", "content": text}], **more)


def test_token_ids_are_counted() -> None:
    size = PromptMeter().measure(fields(prompt=list(range(300)), max_tokens=20))
    assert (size.prompt_tokens, size.kv_tokens) == (300, 320)
    long = PromptMeter().measure(fields(prompt=[100_000 + i for i in range(1024)]))
    assert len(long.blocks) * long.tokens_per_block == pytest.approx(1024, rel=0.1)
    spaced = {"prompt": msgspec.Raw(b"[ 1, 2 ,3]")}
    assert PromptMeter().measure(spaced).prompt_tokens == 3


@pytest.mark.parametrize("name", ["prompt", "text", "messages"])
def test_text_is_measured_under_every_name_that_engines_know_it_by(name: str) -> None:
    size = PromptMeter().measure(fields(**{name: "x" * 4000}))
    assert size.prompt_tokens == pytest.approx(1000, rel=0.01)
    assert len(size.blocks) == 7


def test_text_is_estimated_and_the_estimate_learns() -> None:
    meter = PromptMeter()
    text = fields(prompt="x" * 4000)
    assert meter.measure(text).prompt_tokens == pytest.approx(1000, rel=0.01)
    for _ in range(200):
        meter.observe(meter.measure(text), 2000)
        meter.observe(meter.measure(fields(prompt=[1, 2, 3])), 3)  # says nothing of text
    assert meter.measure(text).prompt_tokens == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize("counted", [0, 10**9])
def test_no_count_breaks_the_estimate(counted: int) -> None:
    meter = PromptMeter()
    for _ in range(1000):
        meter.observe(meter.measure(fields(prompt="x" * 4000)), counted)
    assert 50 < meter.measure(fields(prompt="x" * 4000)).prompt_tokens < 10_000


@pytest.mark.parametrize(
    ("limits", "expected"), [({"max_tokens": 7}, 7), ({"max_completion_tokens": 9, "max_tokens": 7}, 9), ({}, 256)]
)
def test_the_answer_s_room(limits: dict[str, int], expected: int) -> None:
    for generates in (True, False):  # a prompt that is only read needs no room for an answer
        size = PromptMeter().measure(chat("hello", **limits), generates=generates)
        assert size.kv_tokens - size.prompt_tokens == expected * generates


def test_blocks_are_equal_as_far_as_prompts_are() -> None:
    meter, long = PromptMeter(), "x" * 5000
    first, second = meter.measure(chat(long + "one")), meter.measure(chat(long + "two"))
    assert len(first.blocks) == len(second.blocks) == 9
    assert first.blocks == second.blocks  # of whole blocks; the rest differs
    other = meter.measure(chat("y" + long))
    assert not set(other.blocks) & set(first.blocks)
    with_tools = meter.measure(chat(long, tools=[{"type": "function"}]))
    assert not set(with_tools.blocks) & set(first.blocks)  # templates put tools first
    assert meter.measure(chat("short")).blocks == ()
    assert len(meter.measure(chat("x" * 1_000_000)).blocks) == 32


# ---- demand ---------------------------------------------------------------------------------------------------------


def test_the_revision_without_requests_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "_MAX_REVISIONS", 2)
    seen = Demand()
    for now, revision_id in enumerate(("a", "b", "a", "c")):
        seen.observe(revision_id, 1.0, float(now))
    assert [seen.seconds_per_s(each, 3.0) > 0 for each in "abc"] == [True, False, True]
    assert seen.seconds_per_s("never seen", 3.0) == 0.0
