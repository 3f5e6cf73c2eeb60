"""The fields of requests beside their rules (`router/protocol/rules.py`): a field without one is refused.

A test compares both with the pinned engine, so a new field is classified before it is served.
"""

# Of the fields that have a rule, the ones of one endpoint alone; the other refuses them.
CHAT_ONLY = frozenset({
    "messages", "input_ids", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "continue_final_message", "reasoning_effort", "reasoning", "task", "modalities", "prediction", "verbosity",
})  # fmt: skip
COMPLETIONS_ONLY = frozenset({"prompt", "suffix", "echo", "best_of"})

# OpenAI's fields, and others that clients of several services send, that change nothing here. Engines get none of them.
BOOKKEEPING = frozenset({
    "metadata", "modalities", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "verbosity",
})  # fmt: skip

# Fields of OpenAI and SGLang that change the answer and are not offered, with what to use instead.
NOT_OFFERED = {
    "lora_path": "name the adapter in `adapter`",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the model gives text",
    "ebnf": "a grammar can occupy an engine for ever; use a JSON schema or regex",
    "json_schema": "use response_format",
    "web_search_options": "the model searches nothing",
}

# Strings by which a client may say that requests belong together, the most specific first: a conversation, a person.
STICKY = ("prompt_cache_key", "user", "safety_identifier")

# All fields of /v1/embeddings but `model` and Prelude's own. Engines get none of them as they are.
EMBEDDINGS = frozenset({"input", "encoding_format", "dimensions", "user"})

# Prelude's own fields. They are never sent to an engine.
ADAPTER, ADAPTER_SCALE = "adapter", "adapter_scale"
