"""What a request brings: positions, prompts, grammars, room."""

from __future__ import annotations

from engine.hooks import positions
from engine.hooks.hook import (
    ADAPTER_ROLES,
    DECODE,
    GENERATING_ROLES,
    OUR_ROLES,
    UNIFIED,
    Hook,
    HookGroup,
    HookKind,
    Platform,
)
from engine.hooks.kv import room
from engine.hooks.requests import events, grammars, preparation, tokens

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="A schedule of positions per adapter",
        upstream="none; SGLang applies an adapter to every position",
        remove_when="SGLang has a schedule of positions per adapter",
        hooks=(
            Hook(
                name="batches_are_cut_by_position",
                target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
                fn=positions.cut_into_segments,
                roles=ADAPTER_ROLES,
                source_sha256="c47ef29026e9130f02012ca1481f5508f36435772f44712c7ff6eec498258461",
                why="an adapter acts on its own positions only, token by token; ReFT layers read the same segments",
            ),
            Hook(
                name="slots_for_segments_only",
                target="sglang.srt.lora.lora_manager.LoRAManager.fetch_new_loras",
                fn=positions.fetch_only_adapters_in_use,
                roles=ADAPTER_ROLES,
                source_sha256="9b4202df6f2cecbf1585a65b936ed9afbb86f20ecde2cf5828168211ec922bdf",
                why="a batch needs slots for its adapted tokens only; a decode batch of base tokens needs none",
            ),
            Hook(
                name="lora_runs_on_segments",
                target="sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
                fn=positions.prepare_segments,
                roles=ADAPTER_ROLES,
                source_sha256="5af804fa45681e0f63dafc10962038bafb821c9beab577e01f0dcb457f06aa83",
                why="prefill-only adapters must not slow decode: without adapted tokens a batch takes the base path",
            ),
            Hook(
                name="base_tokens_have_a_slot",
                target="sglang.srt.lora.lora_manager.LoRAManager.validate_lora_batch",
                fn=positions.count_the_base_models_slot,
                roles=ADAPTER_ROLES,
                source_sha256="5fd468662ba381c4d2590e661328fb786e7ef17d62af2eeecd382aa041f7b491",
                why="base tokens of adapted requests need the base model's slot, which SGLang counts for base requests",
            ),
            Hook(
                name="decoding_holds_no_slot",
                target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
                fn=positions.free_slots_of_decoding,
                roles=UNIFIED,
                source_sha256="c52950a4fefc7bbfb9702bdfa9ffcf711b97e9332ab30f77ae2ebf4452c2284e",
                why="more adapters than slots may decode at once; SGLang counts the adapters of running requests",
            ),
            Hook(
                name="retracted_is_adapted_again",
                target="sglang.srt.managers.schedule_batch.Req.reset_for_retract",
                kind=HookKind.AFTER,
                fn=positions.take_adapter_back,
                roles=UNIFIED,
                source_sha256="380a2bc4527600ebd3f9653f22c97df1f8f6b29843d853ef0a2c6561e6601fe9",
                why="a retracted request recomputes its KV: its prompt with the adapter, its answer with base weights",
            ),
            Hook(
                name="finished_answers_are_no_prefix",
                target="sglang.srt.mem_cache.radix_cache.RadixCache.cache_finished_req",
                fn=positions.keep_only_the_prompts_kv,
                roles=UNIFIED,
                source_sha256="55a1780690fd3d236c480e133a44a1bea03f5f8f1cea286e83fbce3457ae5f13",
                why="in the next turn the answer is prompt, hence adapted; the KV that decode wrote for it is not",
            ),
            Hook(
                name="retracted_answers_are_no_prefix",
                target="sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req",
                fn=positions.keep_no_answers_kv,
                roles=UNIFIED,
                source_sha256="6a4d2265998b49ecf58dd0cab86a51b61f39a13e105e286a8ca4d12db91d9eca",
                why="the same for retracted requests: their answers' KV must not become a cached prefix",
            ),
            Hook(
                name="retracted_answers_match_no_prompt",
                target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
                fn=positions.match_the_prompt_only,
                roles=UNIFIED,
                source_sha256="80f286d6ffacfc695f3b47593808875e307573fd3a997cc399bb3e5008ba2a40",
                why="a next turn's prompt may have left adapted KV for the answer's tokens, which must not match it",
            ),
            Hook(
                name="decode_graphs_are_captured_twice",
                target="sglang.srt.model_executor.runner.decode_cuda_graph_runner."
                "DecodeCudaGraphRunner._capture_one_stream",
                fn=positions.capture_decode_with_lora_and_without,
                roles=UNIFIED,
                platform=Platform.GPU,
                source_sha256="df2101a0498718947a53393338c028025c225d3aca539b4951617a05cfd0840e",
                why="a decode batch needs LoRA's kernels under adapters for all positions only",
            ),
            Hook(
                name="adapted_decode_runs_without_graph",
                target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
                fn=positions.no_graph_without_its_kernels,
                roles=UNIFIED,
                source_sha256="130af20445ae9e5ec58da755f24fc515b70d9c5885d2c8d50672e19a7d91d924",
                why="decode graphs have no kernels of ReFT and of LoRA on experts, which act on all positions, too",
            ),
        ),
    ),
    HookGroup(
        lacking="Prompts of any length that nobody decodes",
        upstream="none; a request to FAKE_BOOTSTRAP_HOST is a short warm-up, and one read in chunks ends the scheduler",
        remove_when="a prefill engine reads prompts of requests for 0 tokens without a decode engine",
        hooks=(
            Hook(
                name="prompts_for_nobody_are_chunked",
                target="sglang.srt.managers.schedule_batch.Req.__init__",
                kind=HookKind.AFTER,
                fn=positions.keep_chunks_of_prompts_for_nobody,
                roles=frozenset({"prefill"}),
                source_sha256="e704b6ed9f432d690012354c6c04150abd5cb1f4991ad68b9fc5407fc6916eb0",
                why="a prompt that is only scored needs no decode worker, and may not fit into one batch",
            ),
        ),
    ),
    HookGroup(
        lacking="Embeddings from a prefill engine",
        upstream="none; --is-embedding engines do not generate, and prefill engines drop the hidden states of a batch",
        remove_when="a prefill engine's answers have the hidden states that its requests ask for",
        hooks=(
            Hook(
                name="prefill_returns_hidden_states",
                target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill",
                fn=tokens.keep_last_hidden_states,
                roles=frozenset({"prefill"}),
                source_sha256="f63e64d74690eb41bf7e689a24bb94906c44443e7f3ee18081521c0e5b06ed2c",
                why="an embedding is the last hidden state of a prompt, which needs no decode worker",
            ),
        ),
    ),
    HookGroup(
        lacking="KV room for the tokens that can come, no more",
        upstream="none; a decode engine keeps --num-reserved-decode-tokens for a request, whatever its max_tokens",
        remove_when="a decode engine reserves no more than what a request may still generate",
        hooks=(
            Hook(
                name="decode_reserves_what_can_come",
                target="sglang.srt.disaggregation.decode.DecodePreallocQueue._active_reserved_tokens",
                fn=room.reserve_what_can_come,
                roles=DECODE,
                source_sha256="5da4b3b453893aab8b9256a034906a13924e0962cd33082d5cd4acd9b07bccbe",
                why="requests with short answers need far less; others waited for room that stayed empty",
            ),
        ),
    ),
    HookGroup(
        lacking="Limits on lengths that the scheduler keeps to",
        upstream="none; a prompt that leaves less than two pages of the KV cache, or on a decode engine less than "
        "--num-reserved-decode-tokens, passes the limits and is never scheduled",
        remove_when="SGLang refuses each prompt that its scheduler would not take in an empty cache",
        hooks=(
            Hook(
                name="lengths_are_those_that_fit",
                target="sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
                kind=HookKind.AFTER,
                fn=room.bound_lengths,
                roles=OUR_ROLES,
                source_sha256="e2c4b7196d3f93ec4ced107dc9abfa92b6e8d456197f4f4a8ef1acdedf5b9e5b",
                why="one such prompt would hold up an engine and all requests behind it for good",
            ),
        ),
    ),
    HookGroup(
        lacking="A bound on compiled grammars",
        upstream="none; SGLang and xgrammar keep every grammar, and compile as many at a time as there are threads",
        remove_when="SGLang bounds its cache of grammars, and xgrammar's",
        hooks=(
            Hook(
                name="grammars_are_forgotten",
                target="sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__",
                kind=HookKind.AFTER,
                fn=grammars.keep_the_latest,
                source_sha256="3cbfdbe2e8000e6839f5864dd92563b8e0114949a65ac5d333b2ccb577de9bb5",
                why="each distinct grammar would keep memory for good, 40 MiB for one of 285 KiB",
            ),
            Hook(
                name="compiled_parts_are_forgotten",
                target="sglang.srt.constrained.xgrammar_backend.GrammarCompiler",
                kind=HookKind.GLOBAL,
                fn=grammars.with_a_bounded_cache,
                source_sha256="2f924bdfd9881dd5f39d03055719cab78c4f1082f14b4c49d1d53e57cfcc38df",
                why="the compiler has a cache of its own without a bound, and threads for all cores",
            ),
        ),
    ),
    HookGroup(
        lacking="Sampling that compiles nothing while requests wait",
        upstream="none; repetition_penalty runs through torch.compile, at its first use in each engine and per shape",
        remove_when="SGLang compiles it at start, or not at all",
        hooks=(
            Hook(
                name="repetition_penalty_is_not_compiled",
                target="sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties",
                fn=tokens.run_uncompiled,
                roles=OUR_ROLES,
                source_sha256="a7b8f0cce8e432fba57890f04b5c8937a25a78f3a7764f2e78816996fa3db775",
                why="the first repetition_penalty stops an engine, and all its requests, for 10 to 50 s",
            ),
        ),
    ),
    HookGroup(
        lacking="A bound on streamed events",
        upstream="--stream-interval sets one number of tokens per event, for idle and busy engines alike",
        remove_when="SGLang streams several tokens per event when its server has no time for one each",
        hooks=(
            Hook(
                name="busy_engines_stream_fewer_events",
                target="sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer._stream_output_generation",
                fn=events.stream_in_bounds,
                roles=GENERATING_ROLES,
                source_sha256="4b7f7afb740ae4eba7e79aebfda4879c93a793d004fb04cf431a42fc6f662f0e",
                why="an event costs the server 70 µs; a GPU generates more tokens than one process can send",
            ),
        ),
    ),
    HookGroup(
        lacking="Preparation of requests off the server's event loop",
        upstream="--enable-dynamic-batch-tokenizer is for texts of completions only; chats are tokenised on the loop",
        remove_when="SGLang renders templates, checks tools and tokenises in threads",
        hooks=(
            Hook(
                name="long_requests_are_prepared_in_threads",
                target="sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
                fn=preparation.prepare_in_a_thread,
                source_sha256="f2031b1b78706769ff26d950ed6736a0fa9ad6f6c648727dee6a703bdcccab24",
                why="a long chat or a large tool would stop the server for all other requests while it is prepared",
            ),
            Hook(
                name="long_texts_are_tokenized_in_threads",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_texts",
                fn=preparation.tokenize_in_a_thread,
                source_sha256="d81a622a472b2cdf59b03486cc99667444875a0f62822c16272f66b81eeb83bd",
                why="the same for the text of a completion or a score",
            ),
        ),
    ),
)
