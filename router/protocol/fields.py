"""Whose field is it: every field of the engine's request types, sorted.

A test compares both sets with the pinned engine, so that a new field is sorted before it is served.
"""

from __future__ import annotations

# What clients may say: OpenAI's fields and the engine's extensions that concern one's own request only.
USER_FACING = frozenset({
    # what is asked
    "model", "messages", "prompt", "input_ids", "suffix", "user", "task", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "continue_final_message", "reasoning_effort",
    "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video",
    # how it is sampled
    "best_of", "n", "seed", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "response_format", "json_schema", "regex", "ebnf",
    # how far
    "max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    # what comes back
    "stream", "stream_options", "echo", "logprobs", "top_logprobs", "no_stop_trim", "skip_special_tokens",
    "separate_reasoning", "stream_reasoning", "return_cached_tokens_details", "return_token_ids",
    "return_prompt_token_ids",
})  # fmt: skip

# What would reach another tenant's adapter, KV or place in the queue, or the inside of an engine.
ENGINE_INTERNAL = frozenset({
    # which adapter and whose KV
    "lora_path", "extra_key", "cache_salt", "session_id", "session_params", "rid",
    # which worker, and the way between two of them
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank",
    "data_parallel_rank", "priority", "custom_labels",
    # code and patterns that run in the scheduler, which every request of the worker waits for
    "custom_logit_processor", "custom_params", "stop_regex", "images_config",
    # the engine's insides
    "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_meta_info",
})  # fmt: skip

# Refused from clients. `lora_id` is not a field of the HTTP API at the pin, but is of the engine's own request.
REFUSED = ENGINE_INTERNAL | {"lora_id"}

# Prelude's own field, which no engine sees.
ADAPTER = "adapter"
