"""The official `openai` client, used as its documentation says.

Then behaviour that the API tests of vLLM and SGLang ask for, where no other test does, written anew against a pair with
an adapter; what those tests ask of fields of their own is left out.
"""

import itertools
import json
import re
from functools import partial

import openai
import pytest
from support.clusters.running_cluster import RunningCluster
from transformers import AutoTokenizer

HELLO = [{"role": "user", "content": "Hello, how are you today?"}]
CITY = {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}}
PARAMETERS = {"type": "object", "properties": CITY, "required": ["city", "days"], "additionalProperties": False}
TOOL = {"name": "get_weather", "description": "The weather of a city", "strict": True, "parameters": PARAMETERS}
TOOL = {"type": "function", "function": TOOL}
PERSON = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}}
PERSON = {"type": "object", "properties": PERSON, "required": ["name", "age"], "additionalProperties": False}
ON_A0 = {"adapter": "a0"}
SEA = "The sea is wide"
GREEDY = {"model": "a0", "temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(cluster: RunningCluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(cluster: RunningCluster):
    return AutoTokenizer.from_pretrained(cluster.model_dir)


def chat(client: openai.OpenAI, **fields):
    fields = {"model": "demo", "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}
    return client.chat.completions.create(**fields)


def test_models(client: openai.OpenAI, cluster: RunningCluster):
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {"demo", *cluster.adapters}  # those that cannot be served are left out
    assert models["demo"].parent is None
    assert all(models[name].parent == "demo" for name in cluster.adapters)
    assert client.models.retrieve("a0").id == "a0"


def test_headers_and_fingerprint_name_adapter_and_revision(client: openai.OpenAI):
    create = partial(client.chat.completions.with_raw_response.create, model="demo", messages=HELLO, max_tokens=2)
    raw = create(extra_body={"adapter": "a0@latest"})
    revision = raw.headers["x-prelude-revision"]
    assert raw.headers["x-prelude-adapter"] == "a0"
    assert revision.startswith("sha256:")
    assert revision.removeprefix("sha256:")[:12] in raw.parse().system_fingerprint
    base = create()
    assert "x-prelude-adapter" not in base.headers
    assert "x-prelude-revision" not in base.headers
    pinned = create(extra_body={"adapter": f"a0@{revision}"})
    assert pinned.headers["x-prelude-revision"] == revision


@pytest.mark.parametrize(
    "named", [{"model": "a0"}, {"model": "demo:a0"}, {"extra_body": ON_A0}, {"model": "a0", "extra_body": ON_A0}]
)
def test_every_way_to_name_an_adapter(client: openai.OpenAI, named):
    answer = chat(client, **named)
    assert answer.choices[0].message.content == chat(client, extra_body=ON_A0).choices[0].message.content
    assert answer.model == named.get("model", "demo")


def test_chat_streamed_equals_not_streamed(client: openai.OpenAI):
    stream = chat(client, stream=True, stream_options={"include_usage": True}, extra_body=ON_A0, max_tokens=16)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = chat(client, extra_body=ON_A0, max_tokens=16)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.system_fingerprint for chunk in chunks}) == 1


def test_tokenize_and_detokenize(client: openai.OpenAI, tokenizer):
    ids = tokenizer.encode("The caf\u00e9 at the sea")
    for model in ("demo", "a0"):
        found = client.post("/tokenize", body={"model": model, "prompt": "The caf\u00e9 at the sea"}, cast_to=object)
        assert (found["tokens"], found["count"]) == (ids, len(ids))
    several = client.post("/tokenize", body={"prompt": ["The sea", "a"]}, cast_to=object)
    assert several["tokens"] == [tokenizer.encode("The sea"), tokenizer.encode("a")]
    of_chat = client.post("/tokenize", body={"messages": HELLO}, cast_to=object)
    assert of_chat["count"] == chat(client).usage.prompt_tokens
    text = client.post("/detokenize", body={"model": "demo", "tokens": ids}, cast_to=object)
    assert text["text"] == text["prompt"] == tokenizer.decode(ids, skip_special_tokens=True)
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.post("/tokenize", body={"model": "nobody", "prompt": "x"}, cast_to=object)


def test_embeddings(client: openai.OpenAI, tokenizer):
    """The client asks for base64 unless it is told otherwise; a text and its token ids are the same prompt."""
    ids = [tokenizer.encode(text) for text in ("The sea", "A thousand lamps")]
    texts = client.embeddings.create(model="demo", input=["The sea", "A thousand lamps"], extra_body=ON_A0)
    numbers = client.embeddings.create(model="a0", input=ids, encoding_format="float")
    plain = client.embeddings.create(model="demo", input="The sea")
    for first, second in zip(texts.data, numbers.data, strict=True):
        assert first.embedding == pytest.approx(second.embedding, abs=1e-5)
    assert plain.data[0].embedding != pytest.approx(texts.data[0].embedding, abs=1e-2)
    assert texts.usage.prompt_tokens == sum(map(len, ids))
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="demo", input="The sea", dimensions=8)


def respond(client: openai.OpenAI, **fields):
    fields = {"model": "demo", "input": HELLO[0]["content"], "max_output_tokens": 8, "temperature": 0, **fields}
    return client.responses.create(**fields)


def test_responses_are_what_a_chat_answers(client: openai.OpenAI):
    for adapter in ({}, ON_A0):
        whole = respond(client, extra_body=adapter, instructions="Be kind.")
        messages = [{"role": "system", "content": "Be kind."}, *HELLO]
        asked = chat(client, messages=messages, extra_body=adapter)
        assert whole.output_text == asked.choices[0].message.content
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert whole.usage.input_tokens == asked.usage.prompt_tokens
        assert (whole.usage.output_tokens, whole.usage.total_tokens) == (8, asked.usage.total_tokens)
        assert whole.store is False
        assert whole.system_fingerprint == asked.system_fingerprint
        *events, last = respond(client, extra_body=adapter, instructions="Be kind.", stream=True)
        assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
        assert (events[0].type, last.type) == ("response.created", "response.incomplete")
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == last.response.output_text == whole.output_text
        counts = [each.usage.model_dump(exclude={"input_tokens_details"}) for each in (last.response, whole)]
        assert counts[0] == counts[1]  # but for the prompt's tokens that a cache had
    assert respond(client, extra_body=ON_A0).output_text != respond(client).output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not offered"):
        respond(client, previous_response_id="resp_1")


def test_a_conversation_of_responses_is_that_of_a_chat(client: openai.OpenAI):
    first = respond(client, extra_body=ON_A0)
    again = {"role": "user", "content": "And now?"}
    second = respond(client, input=[*HELLO, *first.output, again], extra_body=ON_A0)
    messages = [*HELLO, {"role": "assistant", "content": first.output_text}, again]
    asked = chat(client, messages=messages, extra_body=ON_A0)
    assert second.output_text == asked.choices[0].message.content
    assert second.usage.input_tokens == asked.usage.prompt_tokens


def test_responses_in_a_json_schema(client: openai.OpenAI):
    form = {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON}
    answer = respond(client, text={"format": form}, max_output_tokens=80, extra_body=ON_A0)
    assert answer.status == "completed"
    assert set(json.loads(answer.output_text)) == {"name", "age"}


def test_prompts_of_nothing_but_token_0(client: openai.OpenAI):
    """SGLang takes such a list of ids for an empty prompt."""
    fields = {"model": "demo", "max_tokens": 4, "temperature": 0, "extra_body": {**ON_A0, "ignore_eos": True}}
    several = client.completions.create(prompt=[[0, 0, 0], [0]], **fields)
    assert several.usage.prompt_tokens == 4
    for prompt, choice in zip([[0, 0, 0], [0]], several.choices, strict=True):
        assert client.completions.create(prompt=prompt, **fields).choices[0].text == choice.text
        streamed = client.completions.create(prompt=prompt, stream=True, **fields)
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == choice.text
        scored = client.completions.create(prompt=prompt, echo=True, logprobs=1, **{**fields, "max_tokens": 0})
        assert len(scored.choices[0].logprobs.tokens) == len(prompt)


def test_streamed_logprobs_equal_the_whole_answer(client: openai.OpenAI):
    fields = {"model": "a0", "prompt": "The sea", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=2).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, logprobs=2, stream=True)]
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == whole.logprobs.tokens
    streamed = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
    assert streamed == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


def test_what_stopped_an_answer_is_named(client: openai.OpenAI):
    fields = {"model": "a0", "prompt": "The sea", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**fields, extra_body={"ignore_eos": True, "return_token_ids": True}).choices[0]
    assert (whole.finish_reason, whole.matched_stop) == ("length", None)
    token = whole.token_ids[3]
    extra = {"stop_token_ids": [token], "return_token_ids": True}
    by_id = client.completions.create(**fields, extra_body=extra).choices[0]
    assert (by_id.finish_reason, by_id.matched_stop) == ("stop", token)
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    word = " " + whole.text.split()[2]
    by_text = client.completions.create(**fields, stop=word, extra_body={"ignore_eos": True}).choices[0]
    assert (by_text.finish_reason, by_text.matched_stop) == ("stop", word)
    assert by_text.text == whole.text[: whole.text.index(word)]


def test_json_schema(client: openai.OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    for adapter in ({}, ON_A0):
        answer = chat(client, response_format=form, max_tokens=80, extra_body=adapter)
        assert answer.choices[0].finish_reason == "stop"
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
    streamed = chat(client, response_format=form, max_tokens=80, extra_body=ON_A0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert json.loads(text) == person


@pytest.fixture(scope="module")
def tool_call(tokenizer) -> dict:
    """A request for a tool call. White space is biased away: left to itself a model that has learned nothing, asked
    greedily, fills JSON with it."""
    blank = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    bias = {str(token): -100 for token in blank}
    return {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120, "logit_bias": bias, "extra_body": ON_A0}


def test_tools(client: openai.OpenAI, tool_call: dict):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = chat(client, **{**tool_call, "tool_choice": choice})
        call = answer.choices[0].message.tool_calls[0]
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city", "days"}
    # Left to itself the model calls nothing, but it must be asked.
    assert chat(client, tools=[TOOL], tool_choice="auto").choices[0].finish_reason == "length"


def test_tools_streamed(client: openai.OpenAI, tool_call: dict):
    chunks = list(chat(client, stream=True, **tool_call))
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.name == "get_weather"
    assert not any("id" in call.model_fields_set or "name" in call.function.model_fields_set for call in calls[1:])
    arguments = "".join(call.function.arguments or "" for call in calls if call.index == 0)
    assert set(json.loads(arguments)) == {"city", "days"}


def test_two_choices(client: openai.OpenAI):
    # Sampled, a choice may meet the end-of-sequence token before its 16 tokens are there.
    answer = chat(client, n=2, temperature=1.0, seed=7, max_tokens=16, extra_body={**ON_A0, "ignore_eos": True})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 32


# ---- what the tests of peers ask for ---------------------------------------------------------------------------------


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
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.completions.create(**GREEDY, prompt=SEA, logprobs=101, stream=stream)


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
            texts, ends = dict.fromkeys(range(num_prompts * n), ""), {}
            for choice in (chunk.choices[0] for chunk in chunks):
                texts[choice.index] += choice.text
                ends.setdefault(choice.index, []).append(choice.finish_reason)
                assert (choice.logprobs is not None) == (logprobs is not None), form
            assert all(reasons[-1] == "length" and not any(reasons[:-1]) for reasons in ends.values()), form
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
