"""The official `openai` client, used as its documentation says."""

from __future__ import annotations

import json

import openai
import pytest
from support.clusters.running_cluster import RunningCluster

HELLO = [{"role": "user", "content": "Hello, how are you today?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
ON_A0 = {"adapter": "a0"}


@pytest.fixture(scope="module")
def client(cluster: RunningCluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client: openai.OpenAI, **fields):
    fields = {"model": "demo", "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}
    return client.chat.completions.create(**fields)


def test_models(client: openai.OpenAI, cluster: RunningCluster):
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {"demo", *cluster.adapters}  # those that cannot be served are left out
    assert models["demo"].parent is None
    assert all(models[name].parent == "demo" for name in cluster.adapters)
    assert client.models.retrieve("a0").id == "a0"


def test_chat(client: openai.OpenAI):
    answer = chat(client, extra_body=ON_A0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.choices[0].message.content != chat(client).choices[0].message.content


def test_headers_and_fingerprint_name_adapter_and_revision(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=2, extra_body={"adapter": "a0@latest"}
    )
    revision = raw.headers["x-prelude-revision"]
    assert raw.headers["x-prelude-adapter"] == "a0"
    assert revision.startswith("sha256:")
    assert revision.removeprefix("sha256:")[:12] in raw.parse().system_fingerprint
    base = client.chat.completions.with_raw_response.create(model="demo", messages=HELLO, max_tokens=2)
    assert "x-prelude-adapter" not in base.headers
    assert "x-prelude-revision" not in base.headers
    pinned = client.chat.completions.with_raw_response.create(
        model="demo", messages=HELLO, max_tokens=2, extra_body={"adapter": f"a0@{revision}"}
    )
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


def test_completions(client: openai.OpenAI):
    fields = {"model": "demo", "prompt": "The sea", "max_tokens": 12, "temperature": 0, "extra_body": ON_A0}
    whole = client.completions.create(**fields)
    streamed = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text  # no usage: nobody asked
    assert whole.usage.completion_tokens == 12


def test_stop(client: openai.OpenAI):
    whole = chat(client, max_tokens=24).choices[0].message.content
    word = whole.split()[3]
    stopped = chat(client, max_tokens=24, stop=[" " + word])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == whole[: whole.index(" " + word)]


def test_logprobs(client: openai.OpenAI):
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=5, extra_body=ON_A0)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert max(top.logprob for top in entry.top_logprobs) == pytest.approx(entry.logprob, abs=1e-5)  # greedy


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_prompt_logprobs(client: openai.OpenAI, num_logprobs: int):
    fields = {"model": "demo", "prompt": "The sea", "echo": True, "temperature": 0, "extra_body": ON_A0}
    whole = client.completions.create(**fields, max_tokens=3, logprobs=num_logprobs)
    prompt = client.completions.create(**fields, max_tokens=0, logprobs=num_logprobs)
    found, of_prompt = whole.choices[0].logprobs, prompt.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == whole.usage.total_tokens
    assert len(found.top_logprobs) == (whole.usage.total_tokens if num_logprobs else 0)
    assert (prompt.choices[0].text, prompt.choices[0].finish_reason) == ("The sea", "length")
    assert prompt.usage.total_tokens == prompt.usage.prompt_tokens == len(of_prompt.tokens)
    assert of_prompt.tokens == found.tokens[:-3]
    assert of_prompt.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:-3], abs=1e-4)
    without = client.completions.create(**{**fields, "extra_body": {}}, max_tokens=0, logprobs=num_logprobs)
    assert without.choices[0].logprobs.token_logprobs[1:] != pytest.approx(of_prompt.token_logprobs[1:], abs=1e-3)


def test_tokenize_and_detokenize(client: openai.OpenAI, cluster: RunningCluster):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cluster.model_dir)
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


def test_embeddings(client: openai.OpenAI, cluster: RunningCluster):
    """The client asks for base64 unless it is told otherwise; a text and its token ids are the same prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cluster.model_dir)
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


def test_what_is_not_offered_says_why(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve("resp_1")


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
        found, expected = (
            each.model_dump(exclude={"input_tokens_details"}) for each in (last.response.usage, whole.usage)
        )
        assert found == expected  # but for the prompt's tokens that a cache had
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
    properties = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    form = {"type": "json_schema", "name": "person", "strict": True, "schema": schema}
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


def test_streams_say_once_how_each_choice_ended(client: openai.OpenAI):
    """As peers' API tests ask: one finish reason per choice, in its last chunk, and usage in a chunk of its own."""
    fields = {"model": "demo", "prompt": ["The sea", "A thousand"], "n": 2, "max_tokens": 6, "temperature": 0}
    fields |= {"extra_body": {**ON_A0, "ignore_eos": True}}
    ends: dict[int, list[str | None]] = {}
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            ends.setdefault(choice.index, []).append(choice.finish_reason)
    assert sorted(ends) == [0, 1, 2, 3]
    assert all(reasons[-1] == "length" and not any(reasons[:-1]) for reasons in ends.values())
    assert last.choices == []
    assert last.usage.completion_tokens == 24
    assert last.usage.total_tokens == last.usage.prompt_tokens + 24


def test_streamed_echo_and_logprobs_equal_the_whole_answer(client: openai.OpenAI):
    fields = {"model": "a0", "prompt": "The sea", "max_tokens": 6, "temperature": 0}
    whole = client.completions.create(**fields, logprobs=2).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, logprobs=2, stream=True)]
    assert [token for chunk in chunks for token in chunk.logprobs.tokens] == whole.logprobs.tokens
    streamed = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
    assert streamed == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
    echoed = client.completions.create(**fields, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in echoed) == "The sea" + whole.text


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
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}}
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
def tool_call(cluster: RunningCluster) -> dict:
    """A request for a tool call. White space is biased away: left to itself a model that has learned nothing, asked
    greedily, fills JSON with it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cluster.model_dir)
    blank = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    return {
        "tools": [TOOL],
        "tool_choice": "required",
        "max_tokens": 120,
        "logit_bias": {str(token): -100 for token in blank},
        "extra_body": ON_A0,
    }


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
    greedy = chat(client, n=2, extra_body=ON_A0)
    assert greedy.choices[0].message.content == greedy.choices[1].message.content
    assert greedy.usage.prompt_tokens == chat(client, extra_body=ON_A0).usage.prompt_tokens


def test_two_choices_streamed(client: openai.OpenAI):
    texts = {0: "", 1: ""}
    finished = set()
    usage = None
    for chunk in chat(client, n=2, stream=True, stream_options={"include_usage": True}, extra_body=ON_A0):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                finished.add(choice.index)
    assert finished == {0, 1}
    assert texts[0] == texts[1] == chat(client, extra_body=ON_A0).choices[0].message.content
    assert usage.completion_tokens == 16


def test_several_prompts(client: openai.OpenAI):
    fields = {"model": "demo", "max_tokens": 6, "temperature": 0, "extra_body": ON_A0}
    prompts = ["The sea", "A thousand people"]
    together = client.completions.create(prompt=prompts, **fields)
    assert [choice.index for choice in together.choices] == [0, 1]
    for prompt, choice in zip(prompts, together.choices, strict=True):
        assert choice.text == client.completions.create(prompt=prompt, **fields).choices[0].text


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="nobody"):
        chat(client, extra_body={"adapter": "nobody"})
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        chat(client, model="gpt-4o")
    with pytest.raises(openai.BadRequestError, match="lora_path"):
        chat(client, extra_body={"lora_path": "x"})


def test_async_client(cluster: RunningCluster):
    import asyncio

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(chat(client, extra_body={"adapter": adapter}) for adapter in ("a0", "a1", "a0", "a2"))
            )
            return [answer.choices[0].message.content for answer in answers]

    texts = asyncio.run(run())
    assert texts[0] == texts[2]
    assert len(set(texts)) == 3
