"""Limits of requests, the section `router.limits` of `cluster.yaml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

# Arguments of transformers' `apply_chat_template`: a client that could set them could run a template of its own.
_ARGUMENTS_OF_TEMPLATES = frozenset({
    "chat_template", "conversation", "messages", "tools", "documents", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
})  # fmt: skip


def _check_template_variable(name: str) -> str:
    if name in _ARGUMENTS_OF_TEMPLATES:
        raise ValueError(f"{name} is not for clients to set: it is no variable of a template; remove it")
    return name


TemplateVariable = Annotated[
    str, StringConstraints(pattern=r"^[a-z_]{1,64}$"), AfterValidator(_check_template_variable)
]


class RequestLimits(BaseModel):
    """Limits of one request's body, and of all bodies together. docs/api.md lists the fields that they are about."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_bytes_per_token: Annotated[int, Field(ge=1)] = 16  # JSON text of a prompt, per token of the context length
    choice_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024**2  # sequences of a request x bytes of their fields
    in_flight_bytes: Annotated[int, Field(ge=1024)] = 512 * 1024**2  # bodies of requests in flight, of each process
    nesting: Annotated[int, Field(ge=8, le=100)] = 100  # of arrays and objects
    messages: Annotated[int, Field(ge=1)] = 1024
    content_parts: Annotated[int, Field(ge=1)] = 1024  # of all messages of a request
    tools: Annotated[int, Field(ge=0)] = 128
    tools_bytes: Annotated[int, Field(ge=0)] = 128 * 1024  # `tools`, also those of a message
    tool_calls: Annotated[int, Field(ge=0)] = 512  # of all messages of a request
    stops: Annotated[int, Field(ge=0)] = 32  # strings of `stop`
    stop_bytes: Annotated[int, Field(ge=1)] = 1024  # of all of them
    stop_token_ids: Annotated[int, Field(ge=0)] = 128
    logit_bias: Annotated[int, Field(ge=0)] = 1024  # token ids
    choice_biases: Annotated[int, Field(ge=0)] = 8192  # sequences x token ids of logit_bias
    prompt_logprobs: Annotated[int, Field(ge=1)] = 65_536  # log-probabilities of a prompt: its bytes x (1 + logprobs)
    # Log-probabilities of an answer that is not streamed: sequences x max_tokens x (1 + alternatives).
    answer_logprobs: Annotated[int, Field(ge=256)] = 262_144
    schema_bytes: Annotated[int, Field(ge=0)] = 32 * 1024  # of a JSON schema that output must match
    regex_bytes: Annotated[int, Field(ge=0)] = 1024  # of a regular expression, and of all those in a schema
    # Of an EBNF grammar. 0 refuses them: one of 28 bytes can occupy an engine for ever, so clients must be trusted.
    ebnf_bytes: Annotated[int, Field(ge=0)] = 0
    # Variables of the chat template that clients may set, besides enable_thinking and the others of docs/api.md.
    template_kwargs: tuple[TemplateVariable, ...] = ()
