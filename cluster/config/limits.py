"""Limits of requests, the section `router.limits` of `cluster.yaml`."""

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StringConstraints

from cluster.config.fields import Section

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


class RequestLimits(Section):
    """Limits of one request's body, and of all bodies together. docs/api.md lists the fields that they are about."""

    in_flight_bytes: Annotated[int, Field(ge=1024)] = 512 * 1024**2  # bodies of requests in flight
    messages: Annotated[int, Field(ge=1)] = 1024
    tools: Annotated[int, Field(ge=0)] = 128
    tools_bytes: Annotated[int, Field(ge=0)] = 128 * 1024  # `tools`, also those of a message
    schema_bytes: Annotated[int, Field(ge=0)] = 32 * 1024  # of a JSON schema that output must match
    # Variables of the chat template that clients may set, besides enable_thinking and the others of docs/api.md.
    template_kwargs: tuple[TemplateVariable, ...] = ()

    # What no known client comes near, and what bounds the work of one request.
    prompt_bytes_per_token: ClassVar[int] = 16  # JSON text of a prompt, per token of the context length
    choice_bytes: ClassVar[int] = 32 * 1024**2  # sequences of a request x bytes of their fields
    nesting: ClassVar[int] = 100  # of arrays and objects
    content_parts: ClassVar[int] = 1024  # of all messages of a request
    tool_calls: ClassVar[int] = 512  # of all messages of a request
    stops: ClassVar[int] = 32  # strings of `stop`
    stop_bytes: ClassVar[int] = 1024  # of all of them
    stop_token_ids: ClassVar[int] = 128
    logit_bias: ClassVar[int] = 1024  # token ids
    choice_biases: ClassVar[int] = 8192  # sequences x token ids of logit_bias
    prompt_logprobs: ClassVar[int] = 65_536  # log-probabilities of a prompt: its bytes x (1 + logprobs)
    # Log-probabilities of an answer that is not streamed: sequences x max_tokens x (1 + alternatives).
    answer_logprobs: ClassVar[int] = 32_768
    regex_bytes: ClassVar[int] = 1024  # of a regular expression, and of all those in a schema
