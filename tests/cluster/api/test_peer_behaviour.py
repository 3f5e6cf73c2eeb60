"""Behaviour that the API tests of vLLM and SGLang ask for, where no other test here does (docs/evidence.md lists all).

Written anew against a pair with an adapter; what those tests ask of fields of their own is left out.
"""

from __future__ import annotations

import itertools
import re

import openai
import pytest
from support.clusters.running_cluster import RunningCluster
from transformers import AutoTokenizer

HELLO = [{"role": "user", "content": "Hello, how are you today?"}]
SEA = "The sea is wide"
GREEDY = {"model": "a0", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(cluster: RunningCluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(cluster: RunningCluster):
    return AutoTokenizer.from_pretrained(cluster.model_dir)


def test_alternatives_of_a_chat(client: openai.OpenAI):
    def content(**fields):
        logprobs = client.chat.completions.create(**GREEDY, messages=HELLO, **fields).choices[0].logprobs
        return logprobs and logprobs.content

    assert content() is None
    assert content(logprobs=False) is None
    for number in (0, 5):
        found = content(logprobs=True, top_logprobs=number)
        assert [len(each.top_logprobs) for each in found] == [number] * 6
        assert all(each.logprob <= 0 for each in found)
    for each in found:  # greedy
        assert max(top.logprob for top in each.top_logprobs) == pytest.approx(each.logprob, abs=1e-5)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            content(logprobs=True, top_logprobs=21, stream=stream)


def test_alternatives_of_a_completion(client: openai.OpenAI):
    def logprobs(number, **fields):
        return client.completions.create(**GREEDY, prompt=SEA, logprobs=number, **fields).choices[0].logprobs

    assert logprobs(None) is None
    for number in (0, 1, 5):
        found = logprobs(number)
        assert len(found.tokens) == len(found.token_logprobs) == 6
        assert all(value <= 0 for value in found.token_logprobs)
        if number:
            assert [1 <= len(each) <= number + 1 for each in found.top_logprobs] == [True] * 6
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            logprobs(101, stream=stream)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_when_a_stream_has_usage(client: openai.OpenAI, kind: str):
    def usages(options):
        """Of each chunk: whether it has choices, whether it has text, its usage."""
        fields = {**GREEDY, "stream": True, "stream_options": options, "extra_body": {"ignore_eos": True}}
        if kind == "chat":
            chunks = client.chat.completions.create(**fields, messages=HELLO)
            texts = [(chunk, "".join(choice.delta.content or "" for choice in chunk.choices)) for chunk in chunks]
        else:
            chunks = client.completions.create(**fields, prompt=SEA)
            texts = [(chunk, "".join(choice.text for choice in chunk.choices)) for chunk in chunks]
        return [(bool(chunk.choices), bool(text), chunk.usage) for chunk, text in texts]

    for options in ({}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": False}):
        assert all(has_choices and usage is None for has_choices, _, usage in usages(options)), options
    *before, (has_choices, _, last) = usages({"include_usage": True})
    assert not has_choices
    assert all(usage is None for *_, usage in before)
    assert (last.completion_tokens, last.total_tokens) == (6, last.prompt_tokens + 6)
    every = usages({"include_usage": True, "continuous_usage_stats": True})
    assert all(usage is not None for has_choices, has_text, usage in every if has_text or not has_choices)
    counts = [usage.completion_tokens for *_, usage in every if usage]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for *_, usage in every if usage)
    for options in ({"include_usage": True}, {"include_usage": None}, {}):
        with pytest.raises(openai.BadRequestError, match="stream_options"):
            client.completions.create(**GREEDY, prompt=SEA, stream_options=options)


FORMS = list(itertools.product((False, True), (None, 2), (False, True), (1, 2), (False, True)))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_logprobs_lists_n_and_token_ids_in_every_combination(client: openai.OpenAI, tokenizer, stream: bool):
    ids = tokenizer.encode(SEA)
    for echo, logprobs, is_list, n, by_ids in FORMS:
        form = (echo, logprobs, is_list, n, by_ids)
        prompt = ids if by_ids else SEA
        fields = {**GREEDY, "max_tokens": 3, "echo": echo, "logprobs": logprobs, "n": n, "stream": stream}
        fields |= {"prompt": [prompt, prompt] if is_list else prompt, "extra_body": {"ignore_eos": True}}
        num_prompts = 2 if is_list else 1
        if stream and echo and logprobs:  # not offered
            with pytest.raises(openai.BadRequestError, match="echo with logprobs"):
                client.completions.create(**fields)
            continue
        if stream:
            chunks = list(client.completions.create(**fields, stream_options={"include_usage": True}))
            usage = chunks.pop().usage
            texts = dict.fromkeys(range(num_prompts * n), "")
            for chunk in chunks:
                texts[chunk.choices[0].index] += chunk.choices[0].text
                assert (chunk.choices[0].logprobs is not None) == (logprobs is not None), form
        else:
            answer = client.completions.create(**fields)
            usage, texts = answer.usage, {choice.index: choice.text for choice in answer.choices}
            num_logprobs = 3 + len(ids) * echo
            for choice in answer.choices:
                assert logprobs is None or len(choice.logprobs.tokens) == num_logprobs, form
        assert len(texts) == num_prompts * n, form
        assert len(set(texts.values())) == 1, form  # greedy
        assert texts[0].startswith(SEA) == echo, form
        assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompts * len(ids), 3 * num_prompts * n), form


def test_a_regex_binds_the_answer(client: openai.OpenAI):
    fields = {**GREEDY, "max_tokens": 40, "extra_body": {"regex": "(red|green)-[0-9]{3}"}}
    for text in (
        client.completions.create(**fields, prompt=SEA).choices[0].text,
        client.chat.completions.create(**fields, messages=HELLO).choices[0].message.content,
    ):
        assert re.fullmatch("(red|green)-[0-9]{3}", text)


def test_a_logit_bias_decides(client: openai.OpenAI, tokenizer):
    [token] = tokenizer.encode("a", add_special_tokens=False)
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = client.completions.create(**GREEDY, prompt=SEA, extra_body=extra).choices[0]
    biased = client.completions.create(**GREEDY, prompt=SEA, logit_bias={token: 100}, extra_body=extra).choices[0]
    assert biased.token_ids == [token] * 6
    banned = client.completions.create(**GREEDY, prompt=SEA, logit_bias={whole.token_ids[0]: -100}, extra_body=extra)
    assert banned.choices[0].token_ids[0] != whole.token_ids[0]
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(**GREEDY, prompt=SEA, logit_bias={10**6: 1})


def test_no_fewer_than_min_tokens(client: openai.OpenAI, tokenizer):
    """The end is all but certain, and still does not come too early."""
    bias = {tokenizer.eos_token_id: 100}
    ended = client.completions.create(**GREEDY, prompt=SEA, logit_bias=bias)
    assert (ended.choices[0].finish_reason, ended.usage.completion_tokens) == ("stop", 1)
    later = client.completions.create(**GREEDY, prompt=SEA, logit_bias=bias, extra_body={"min_tokens": 4})
    assert later.usage.completion_tokens >= 4


def test_a_stop_is_kept_on_demand(client: openai.OpenAI):
    fields = {**GREEDY, "prompt": SEA, "max_tokens": 24}
    whole = client.completions.create(**fields, extra_body={"ignore_eos": True}).choices[0].text
    word = " " + whole.split()[2]
    end = whole.index(word)
    for keep, expected in ((False, whole[:end]), (True, whole[: end + len(word)])):
        extra = {"ignore_eos": True, "no_stop_trim": keep}
        assert client.completions.create(**fields, stop=["@@", word], extra_body=extra).choices[0].text == expected


def test_an_answer_continues_what_it_is_given(client: openai.OpenAI):
    """The tokens of a chat whose last message is to be continued end with that message."""
    given = [*HELLO, {"role": "assistant", "content": "The sea"}]
    fields = {**GREEDY, "messages": given}
    extra = {"continue_final_message": True, "return_prompt_token_ids": True}
    continued = client.chat.completions.create(**fields, extra_body=extra)
    other = client.chat.completions.create(**fields)
    assert continued.usage.prompt_tokens < other.usage.prompt_tokens
    assert continued.choices[0].message.content != other.choices[0].message.content
