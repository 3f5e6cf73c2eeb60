"""The fields of /v1/responses, and the hints for OpenAI's fields that are not accepted."""

from typing import Any

from router.protocol.fields import ADAPTER, ADAPTER_SCALE

_STATELESS = "responses are not stored; send the whole conversation in input, earlier output items included"

# Those that a chat has under the same name, with the same rule. Engines get the first of them, and none of the others.
SAME_AS_CHAT = ("temperature", "top_p", "parallel_tool_calls", "stream", "user")
BOOKKEEPING = ("metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier")

# Fields that may say what is the case anyway: the only value that is accepted, and what to do otherwise.
FIXED: dict[str, tuple[Any, str]] = {
    "store": (False, "responses are not stored; leave it out or set it to false"),
    "background": (False, "leave it out or set it to false, and use stream for long answers"),
    "truncation": ("disabled", "leave it out or set it to disabled, and shorten input yourself"),
    "include": ([], "leave it out; for log-probabilities use /v1/chat/completions with logprobs"),
}

FIELDS = frozenset({
    "model", ADAPTER, ADAPTER_SCALE, "input", "instructions", "max_output_tokens", "tools", "tool_choice", "text",
    "reasoning", "stream_options", *SAME_AS_CHAT, *BOOKKEEPING, *FIXED,
})  # fmt: skip

NOT_OFFERED = {
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "templates of prompts are not stored; put the text into instructions and input",
    "max_tool_calls": "it bounds built-in tools, and there are none; remove it",
    "top_logprobs": "use /v1/chat/completions with logprobs",
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
    "verbosity": "use text.verbosity",
    "functions": "use tools",
    "function_call": "use tool_choice",
}

# How a chat's fields are called here, the longer names first: a chat's rules check what a request is translated to.
NAME_OF = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}
