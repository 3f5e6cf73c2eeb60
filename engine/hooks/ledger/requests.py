"""What a request brings, positions, prompts, grammars and room, and what its answer holds."""

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
)
from engine.hooks.kv import room
from engine.hooks.requests import cut_calls, events, grammars, tokens

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="A schedule of positions per adapter",
        remove_when="SGLang has a schedule of positions per adapter",
        hooks=(
            Hook(
                name="batches_are_cut_by_position",
                target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
                fn=positions.cut_into_segments,
                roles=ADAPTER_ROLES,
                source_sha256="1f92fa245fced357d681c76ce8b7874c4b1fab10380a8eb3f88243c6ab7aa35f",
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
                source_sha256="75d832c03b74846ac0701959337e7e3d47522a6d70449719ad6d0b23f884b353",
                why="prefill-only adapters must not slow decode: without adapted tokens a batch takes the base path",
            ),
            Hook(
                name="base_tokens_have_a_slot",
                target="sglang.srt.lora.lora_manager.LoRAManager.validate_lora_batch",
                fn=positions.count_the_base_models_slot,
                roles=ADAPTER_ROLES,
                source_sha256="bdff61f3f92bd884f7c833bb0aa53db0938de7d267cb0d5f4b8afd7b54a3c434",
                why="base tokens of adapted requests need the base model's slot, which SGLang counts for base requests",
            ),
            Hook(
                name="decoding_holds_no_slot",
                target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
                fn=positions.free_slots_of_decoding,
                roles=UNIFIED,
                source_sha256="09e8cf03a4d0c1bb2eaeed359d929a07c7df0c44281849b92ed2cba922402eec",
                why="more adapters than slots may decode at once; SGLang counts the adapters of running requests",
            ),
            Hook(
                name="answers_are_no_prefix",
                target="sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
                fn=positions.keep_only_the_prompts_kv,
                roles=UNIFIED,
                source_sha256="3a20fa5c0617352cc19485b47d5fc54b429288fe6deb62747ed95f4fd7ffd098",
                why="in the next turn the answer is prompt, hence adapted; the KV that decode wrote for it is not",
            ),
            Hook(
                name="retracted_answers_match_no_prompt",
                target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
                fn=positions.match_the_prompt_only,
                roles=UNIFIED,
                source_sha256="28ac28ced09b6cb7bbf0f69febbcba4103cd96b90c362a9ae354093a58686a74",
                why="a next turn's prompt may have left adapted KV for the answer's tokens, which must not match it",
            ),
            Hook(
                name="adapted_decode_runs_without_graph",
                target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
                fn=positions.no_graph_without_its_kernels,
                roles=UNIFIED,
                source_sha256="04eea97fa5b2b0a13c77375ae365a7082872e92823aae7df87662987ec2b7652",
                why="decode graphs have no kernels of ReFT and of LoRA on experts, which act on all positions, too",
            ),
        ),
    ),
    HookGroup(
        lacking="Embeddings from a prefill engine",
        remove_when="a prefill engine's answers have the hidden states that its requests ask for",
        hooks=(
            Hook(
                name="last_hidden_states_may_be_asked_for",
                target="sglang.srt.entrypoints.http_server.generate_contract_error",
                kind=HookKind.GLOBAL,
                fn=tokens.with_last_hidden_states,
                roles=ADAPTER_ROLES,
                source_sha256="d5d7ae6c5e8f403f9a46617377ab96977d9d4f1f263c0b90fc9fd2769eef061e",
                why="the schema of /generate has no mode `last`, which engines take: all of a prompt's states are "
                "thousands of times as many",
            ),
            Hook(
                name="prefill_returns_hidden_states",
                target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill",
                fn=tokens.keep_last_hidden_states,
                roles=frozenset({"prefill"}),
                source_sha256="db57f1d7fe7d5e38593fe4d4de93fbb114c7d690129df8b16f226ab075767fe5",
                why="an embedding is the last hidden state of a prompt, which needs no decode worker",
            ),
        ),
    ),
    HookGroup(
        lacking="KV room for the tokens that can come, no more",
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
        remove_when="SGLang refuses each prompt that its scheduler would not take in an empty cache",
        hooks=(
            Hook(
                name="lengths_are_those_that_fit",
                target="sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
                kind=HookKind.AFTER,
                fn=room.bound_lengths,
                roles=OUR_ROLES,
                source_sha256="12e6cdfc4b576e5288d9e1a218eeab587681fe8c91ae7d22dd579264b0272ee7",
                why="one such prompt would hold up an engine and all requests behind it for good",
            ),
        ),
    ),
    HookGroup(
        lacking="A bound on compiled grammars, and tool calls without endless whitespace or text after them",
        remove_when="SGLang bounds its cache of grammars, and xgrammar's, that option also reaches structural tags, "
        "and required calls admit no text",
        hooks=(
            Hook(
                name="grammars_are_forgotten",
                target="sglang.srt.constrained.grammar_manager.GrammarManager.__init__",
                kind=HookKind.AFTER,
                fn=grammars.keep_the_latest,
                source_sha256="c36068bf3859779ee96999150b1e9f0bacd1403c04b5d49f896784bc0cad8ed2",
                why="each distinct grammar would keep memory for good, 40 MiB for one of 285 KiB; the compiler has a "
                "cache of its own, and threads for all cores. A small model that may write whitespace in a call goes "
                "on to the length limit",
            ),
        ),
    ),
    HookGroup(
        lacking="Sampling that compiles nothing while requests wait",
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
        remove_when="SGLang streams several tokens per event when its server has no time for one each",
        hooks=(
            Hook(
                name="busy_engines_stream_fewer_events",
                target="sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer._stream_output_generation",
                fn=events.stream_in_bounds,
                roles=GENERATING_ROLES,
                source_sha256="830e84a497de644a3f3e66163ae5212798ba653d6dabb315a41f2735d6333d8b",
                why="an event costs the server 70 µs; a GPU generates more tokens than one process can send",
            ),
        ),
    ),
    HookGroup(
        lacking="Calls that a limit cut",
        remove_when="streams give the arguments up to where the model stopped",
        hooks=(
            Hook(
                name="cut_calls_stay_open",
                target="sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._check_for_unstreamed_tool_args",
                fn=cut_calls.finish_calls,
                roles=OUR_ROLES,
                source_sha256="d92909fef0cb1834eb914c846f5527ba06d35bff20a0b3ecb6abbed66941b14e",
                why="a client would take a closed object for what the model wrote",
            ),
        ),
    ),
)
