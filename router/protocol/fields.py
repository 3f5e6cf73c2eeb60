"""The fields of requests by who may set them. Those that clients may set have a rule in `router/protocol/rules.py`.

A test compares both with the pinned engine, so a new field is classified before it is served.
"""

from __future__ import annotations

# Of the fields that have a rule, the ones of one endpoint alone; the other refuses them.
CHAT_ONLY = frozenset({
    "messages", "input_ids", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "continue_final_message", "reasoning_effort", "reasoning", "task", "modalities", "prediction", "verbosity",
})  # fmt: skip
COMPLETIONS_ONLY = frozenset({"prompt", "suffix", "echo", "best_of", "json_schema"})

# OpenAI's fields, and others that clients of several services send, that change nothing here. Engines get none of them.
BOOKKEEPING = frozenset({
    "metadata", "modalities", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "service_tier", "store", "verbosity",
})  # fmt: skip

# OpenAI's fields that change the answer and are not offered, with what to use instead.
NOT_OFFERED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the model gives text",
    "ebnf": "a grammar can occupy an engine for ever; use a JSON schema or regex",
    "web_search_options": "the model searches nothing",
}

# Fields that would reach another tenant's adapter, KV cache or queue position, or the engine's internals.
ENGINE_INTERNAL = frozenset({
    # adapter and KV cache
    "lora_path", "extra_key", "cache_salt", "session_id", "session_params", "rid",
    # routing and KV transfer
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank",
    "data_parallel_rank", "priority", "custom_labels",
    # code and patterns that run in the scheduler and delay all requests of the worker
    "custom_logit_processor", "custom_params", "stop_regex", "ebnf", "images_config", "watermark",
    # of images and videos, which are not served
    "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "video_config", "mm_processor_kwargs",
    # internal state
    "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_meta_info",
    "return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64", "return_sampling_mask", "sampling_logprobs_mode", "return_spec_tokens_details",
    # a switch of one family's chat template, for which there is `reasoning_effort`
    "thinking",
})  # fmt: skip

# Refused from clients. `lora_id` is not a field of the HTTP API at the pin, but is of the engine's own request.
REFUSED = ENGINE_INTERNAL | {"lora_id"}

# All fields of /v1/embeddings but `model` and `adapter`. Engines get none of them as they are.
EMBEDDINGS = frozenset({"input", "encoding_format", "dimensions", "user"})

# All fields of /v1/tokenize and /v1/detokenize but `model` and `adapter`.
TOKENIZE_FIELDS = frozenset({
    "prompt", "add_special_tokens", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message",
    "chat_template_kwargs",
})  # fmt: skip
DETOKENIZE_FIELDS = frozenset({"tokens", "skip_special_tokens"})

# Prelude's own field. It is never sent to an engine.
ADAPTER = "adapter"
