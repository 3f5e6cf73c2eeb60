"""The engine's fields that clients may not set."""

# Fields that would reach another tenant's adapter, KV cache or queue position, or the engine's internals.
ENGINE_INTERNAL = frozenset({
    # adapter and KV cache
    "lora_path", "extra_key", "cache_salt", "session_id", "session_params", "rid",
    # routing and KV transfer
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank",
    "data_parallel_rank", "priority", "custom_labels",
    # code and patterns that run in the scheduler and delay all requests of the worker
    "custom_logit_processor", "custom_params", "stop_regex", "ebnf", "images_config", "watermark",
    # another way to say `response_format`
    "json_schema",
    # of images and videos, which are not served
    "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "video_config", "mm_processor_kwargs",
    # internal state
    "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_meta_info",
    "return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64", "return_sampling_mask", "sampling_logprobs_mode", "return_spec_tokens_details",
    # a switch of one family's chat template, for which there is `reasoning_effort`
    "thinking",
})  # fmt: skip
