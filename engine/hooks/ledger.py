"""The ledger: every hook of Prelude into SGLang, as data, grouped by what SGLang lacks.

Installation, verification, the page docs/sglang-hooks.md and the tests are made from it.
"""

from __future__ import annotations

from engine.hooks import cpu, identity, inspection, lora_kernels, memory_pool, packed, positions, reft, updates, uses
from engine.hooks.bounds import grammars, log_probabilities, preparation
from engine.hooks.guards import http as http_guard
from engine.hooks.guards import kv as kv_guard
from engine.hooks.hook import Hook, HookGroup, HookKind, Platform

_ADAPTER_ROLES = frozenset({"prefill", "unified"})
_LORA_ROLES = frozenset({"prefill", "unified", "stock"})
_UNIFIED = frozenset({"unified"})
_PAIR_ROLES = frozenset({"prefill", "decode"})
_OUR_ROLES = frozenset({"prefill", "decode", "unified"})

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="Adapter ids chosen by the caller",
        upstream="none; SGLang draws a random id at each load, so loading an adapter twice never collides",
        remove_when="/load_lora_adapter accepts a lora_id",
        hooks=(
            Hook(
                name="revision_is_adapter_id",
                target="sglang.srt.managers.tokenizer_control_mixin.LoRARef",
                kind=HookKind.GLOBAL,
                fn=identity.name_is_id,
                roles=_ADAPTER_ROLES,
                source_sha256="beafef392c5f33e2785cc8aae6f60741ab81469f748ba2cac7b793aae1eedccd",
                why="an adapter's id is part of the prefix-cache key, so it must be the revision id",
            ),
            Hook(
                name="loading_twice_is_harmless",
                target="sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter",
                fn=packed.load_once,
                roles=_ADAPTER_ROLES,
                source_sha256="0c26b29925354d10c2499bd49ab8aad73355aae5ff5fbd6142b29d6cae852e91",
                why="with stable ids, loading a resident adapter again fails an assertion and ends the scheduler",
            ),
        ),
    ),
    HookGroup(
        lacking="Proof that plugins are installed",
        upstream="none; the plugin loader only logs when a plugin fails",
        remove_when="SGLang reports loaded plugins and fails closed",
        hooks=(
            Hook(
                name="scheduler_reports_itself",
                target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
                kind=HookKind.AFTER,
                fn=inspection.report_scheduler,
                source_sha256="ff0eddbe87205963e151a85d7dab574d19dba878e3ffa213867e4b729706d457",
                why="readiness needs proof from each scheduler of its hooks and of whether it holds adapter tensors",
            ),
        ),
    ),
    HookGroup(
        lacking="Load reports while requests wait",
        upstream="none; /v1/loads shows empty queues until the next batch",
        remove_when="the scheduler publishes its load while it waits",
        hooks=(
            Hook(
                name="waiting_is_visible",
                target="sglang.srt.managers.scheduler.Scheduler.on_idle",
                kind=HookKind.AFTER,
                fn=inspection.publish_while_waiting,
                roles=_PAIR_ROLES,
                source_sha256="a6e5e6adff8f370e03ffc815766b27840cd4ae2d43617305e95dfd874112cff2",
                why="requests that wait for their peer or for KV run no batch, so they would be invisible",
            ),
        ),
    ),
    HookGroup(
        lacking="Load reports that count the prompts being computed",
        upstream="none; a request leaves the queue when its batch is made, and is counted again when that has ended",
        remove_when="/v1/loads counts the requests of the batch that is running, and those whose KV is being sent",
        hooks=(
            Hook(
                name="prefill_is_published",
                target="sglang.srt.managers.scheduler.Scheduler.run_batch",
                fn=inspection.publish_prefill,
                roles=_OUR_ROLES,
                source_sha256="af728442e936b53c6ffbc17d47d6e8d8686f0c2a4f80777bfc29f305ce9f7eda",
                why="a worker that drains would end while it computes a long prompt; also counts batches, as progress",
            ),
            Hook(
                name="prefill_is_counted",
                target="sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads",
                kind=HookKind.AFTER,
                fn=inspection.count_prefill,
                roles=_OUR_ROLES,
                source_sha256="4930e6d5ed0145c50be483da79189da633a5cb40153df1a7713b3c26e56e9b5a",
                why="the load that is published has to contain them",
            ),
            Hook(
                name="prefill_is_counted_once",
                target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
                kind=HookKind.AFTER,
                fn=inspection.prefill_ended,
                roles=_OUR_ROLES,
                source_sha256="2b92e6cdbfb7621326695b49adfb7e6f373bfbd99ca49c1574964e414a10b7a9",
                why="from then on SGLang counts these requests itself",
            ),
        ),
    ),
    HookGroup(
        lacking="Signs of life that cost nothing",
        upstream="none; /health_generate generates a token, and the watchdog sees batches of the scheduler only",
        remove_when="SGLang publishes the progress of its scheduler, its detokenizer and its KV thread",
        hooks=(
            Hook(
                name="scheduler_lives",
                target="sglang.srt.managers.scheduler.Scheduler.process_input_requests",
                kind=HookKind.AFTER,
                fn=inspection.live,
                roles=_OUR_ROLES,
                source_sha256="b28e433d094f04139840058d93eb755f4d839ca7dcab49354cf3a5ec404b128c",
                why="every pass of every event loop calls it, so a scheduler that hangs is told from one that computes",
            ),
            Hook(
                name="detokenizer_lives",
                target="sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_configure_logging_req",
                kind=HookKind.AFTER,
                fn=inspection.detokenizer_answers,
                roles=_OUR_ROLES,
                source_sha256="74783ede97c30a8748e0d1a1aaf30c6c3befb9d4cb83b62523ded646d5634e15",
                why="it sleeps until it gets a message, so the scheduler sends one that changes nothing; a spawned one "
                "(on GPUs) loads no plugin, and no answer is expected",
            ),
            Hook(
                name="kv_thread_lives",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._handle_abort_notification",
                fn=inspection.kv_thread_answers,
                roles=frozenset({"prefill"}),
                source_sha256="3ac19dded99f7e953aff802bdfff5bb4a55c539a95782635daf50f5dc01aa863",
                why="a prefill engine whose KV thread has ended serves nobody, and all else of it seems well",
            ),
        ),
    ),
    HookGroup(
        lacking="A KV thread that outlives a bad message",
        upstream="none; an assertion about foreign traffic ends the thread, and the engine goes on as if it were ready",
        remove_when="SGLang drops messages that it cannot take",
        hooks=(
            Hook(
                name="kv_thread_drops_bad_messages",
                target="sglang.srt.disaggregation.nixl.conn.threading",
                kind=HookKind.GLOBAL,
                fn=inspection.with_kept_kv_thread,
                roles=frozenset({"prefill"}),
                source_sha256="28da79ad06baa8c1b725bc98983ca570f82a73b49439873831505ab7f1eef601",
                why="whoever reaches the port could end all prefill of a worker with one message",
            ),
        ),
    ),
    HookGroup(
        lacking="Keys that stay secret, and client certificates",
        upstream="none; /server_info and the log show --api-key and --admin-api-key; --ssl-ca-certs asks no client for "
        "a certificate, and --enable-ssl-refresh misses files that are replaced",
        remove_when="SGLang reads its keys from files or the environment, and offers mutual TLS",
        hooks=(
            Hook(
                name="keys_of_the_environment",
                target="sglang.srt.utils.auth.decide_request_auth",
                fn=http_guard.ask_for_own_keys,
                roles=_OUR_ROLES,
                source_sha256="dd4099e7eaa1d7fadcb89283be9c97714d98032158706afdbd0e8fd31fc29055",
                why="whoever reaches an engine's port must not use it, and who may generate must not load adapters",
            ),
            Hook(
                name="mutual_tls",
                target="sglang.srt.entrypoints.http_server.uvicorn",
                kind=HookKind.GLOBAL,
                fn=http_guard.with_mutual_tls,
                roles=_OUR_ROLES,
                source_sha256="1de1fbce4c87b11b01ab99c802d0684053dc4539b95d8b3a8d88c80d7d238e9a",
                why="beyond the host, engines serve processes of the cluster only",
            ),
        ),
    ),
    HookGroup(
        lacking="KV ports for peers only",
        upstream="none; whoever reaches the bootstrap server or the ports of the ranks can register, ask and send",
        remove_when="SGLang authenticates the engines that exchange KV",
        hooks=(
            Hook(
                name="kv_bootstrap_for_peers",
                target="sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes",
                kind=HookKind.AFTER,
                fn=kv_guard.bootstrap_for_peers,
                roles=frozenset({"prefill"}),
                source_sha256="6cd5f2e4fedb56b6ada397559ba5c14d511c12b9b9aaaa2a26cae79f666d4e4a",
                why="a stranger could register a rank, and get the KV of prompts or send its own",
            ),
            Hook(
                name="kv_messages_from_peers",
                target="sglang.srt.disaggregation.common.conn.get_zmq_socket_on_host",
                fn=kv_guard.socket_for_peers,
                roles=_PAIR_ROLES,
                source_sha256="c1f47315cefe07da12c1cb2af46eb5562cf6c7f60036b32fd5cf86e541e0f279",
                why="a rank does what any message says, such as where to write the KV of a room",
            ),
        ),
    ),
    HookGroup(
        lacking="A schedule of positions per adapter",
        upstream="none; SGLang applies an adapter to every position",
        remove_when="SGLang has a schedule of positions per adapter",
        hooks=(
            Hook(
                name="batches_are_cut_by_position",
                target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
                fn=positions.cut_into_segments,
                roles=_ADAPTER_ROLES,
                source_sha256="c47ef29026e9130f02012ca1481f5508f36435772f44712c7ff6eec498258461",
                why="an adapter acts on its own positions only, token by token; ReFT layers read the same segments",
            ),
            Hook(
                name="slots_for_segments_only",
                target="sglang.srt.lora.lora_manager.LoRAManager.fetch_new_loras",
                fn=positions.fetch_only_adapters_in_use,
                roles=_ADAPTER_ROLES,
                source_sha256="9b4202df6f2cecbf1585a65b936ed9afbb86f20ecde2cf5828168211ec922bdf",
                why="a batch needs slots for its adapted tokens only; a decode batch of base tokens needs none",
            ),
            Hook(
                name="lora_runs_on_segments",
                target="sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
                fn=positions.prepare_segments,
                roles=_ADAPTER_ROLES,
                source_sha256="5af804fa45681e0f63dafc10962038bafb821c9beab577e01f0dcb457f06aa83",
                why="prefill-only adapters must not slow decode: without adapted tokens a batch takes the base path",
            ),
            Hook(
                name="base_tokens_have_a_slot",
                target="sglang.srt.lora.lora_manager.LoRAManager.validate_lora_batch",
                fn=positions.count_the_base_models_slot,
                roles=_ADAPTER_ROLES,
                source_sha256="5fd468662ba381c4d2590e661328fb786e7ef17d62af2eeecd382aa041f7b491",
                why="base tokens of adapted requests need the base model's slot, which SGLang counts for base requests",
            ),
            Hook(
                name="decoding_holds_no_slot",
                target="sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
                fn=positions.free_slots_of_decoding,
                roles=_UNIFIED,
                source_sha256="c52950a4fefc7bbfb9702bdfa9ffcf711b97e9332ab30f77ae2ebf4452c2284e",
                why="more adapters than slots may decode at once; SGLang counts the adapters of running requests",
            ),
            Hook(
                name="retracted_is_adapted_again",
                target="sglang.srt.managers.schedule_batch.Req.reset_for_retract",
                kind=HookKind.AFTER,
                fn=positions.take_adapter_back,
                roles=_UNIFIED,
                source_sha256="380a2bc4527600ebd3f9653f22c97df1f8f6b29843d853ef0a2c6561e6601fe9",
                why="a retracted request recomputes its KV: its prompt with the adapter, its answer with base weights",
            ),
            Hook(
                name="finished_answers_are_no_prefix",
                target="sglang.srt.mem_cache.radix_cache.RadixCache.cache_finished_req",
                fn=positions.keep_only_the_prompts_kv,
                roles=_UNIFIED,
                source_sha256="55a1780690fd3d236c480e133a44a1bea03f5f8f1cea286e83fbce3457ae5f13",
                why="in the next turn the answer is prompt, hence adapted; the KV that decode wrote for it is not",
            ),
            Hook(
                name="retracted_answers_are_no_prefix",
                target="sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req",
                fn=positions.keep_no_answers_kv,
                roles=_UNIFIED,
                source_sha256="6a4d2265998b49ecf58dd0cab86a51b61f39a13e105e286a8ca4d12db91d9eca",
                why="the same for retracted requests: their answer's KV must not become a cached prefix",
            ),
            Hook(
                name="retracted_answers_match_no_prompt",
                target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
                fn=positions.match_the_prompt_only,
                roles=_UNIFIED,
                source_sha256="80f286d6ffacfc695f3b47593808875e307573fd3a997cc399bb3e5008ba2a40",
                why="a next turn's prompt may have left adapted KV for the answer's tokens, which must not match it",
            ),
            Hook(
                name="adapted_decode_runs_without_graph",
                target="sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
                fn=positions.no_graph_for_adapted_decode,
                roles=_UNIFIED,
                source_sha256="130af20445ae9e5ec58da755f24fc515b70d9c5885d2c8d50672e19a7d91d924",
                why="decode graphs are captured without adapter kernels, which adapters for all positions need",
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
                why="so would the text of a completion or a score",
            ),
            Hook(
                name="token_ids_are_answered_in_threads",
                target="sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request",
                fn=preparation.answer_in_a_thread,
                source_sha256="40370192b64eabe27576ae6b70f42d7531407440d121f7b6d5f84a8eb4cf4c94",
                why="so would a text whose token ids are asked for",
            ),
            Hook(
                name="texts_are_answered_in_threads",
                target="sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
                fn=preparation.answer_in_a_thread,
                source_sha256="ea72b3218b38736dc987ec8618659e7a7505af8d8b8012f1cc56bf7f182ce003",
                why="so would many token ids whose text is asked for",
            ),
        ),
    ),
    HookGroup(
        lacking="Answers with many log-probabilities that do not stop the server",
        upstream="none; a comment in detokenize_top_logprobs_tokens asks for one call for all positions",
        remove_when="texts of tokens and long answers are made in bulk or off the loop",
        hooks=(
            Hook(
                name="tokens_are_decoded_once",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager.detokenize_logprob_tokens",
                fn=log_probabilities.decode_each_token_once,
                source_sha256="ba461eb2eeb0fc3ff01a0717599a8a6dd6f2de279bb731302b838e73ba8bfebd",
                why="each token of a prompt is decoded on the event loop, 16,000 times for 16,000 spaces",
            ),
            Hook(
                name="positions_are_decoded_at_once",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager.detokenize_top_logprobs_tokens",
                fn=log_probabilities.decode_all_positions_at_once,
                source_sha256="7b393248bf79f278da47e2676249c18e51f5514be673dbc153d5a74bf436891d",
                why="alternatives are decoded in a call for each position, on the event loop",
            ),
            Hook(
                name="completions_are_written_in_threads",
                target="sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._handle_non_streaming_request",
                fn=log_probabilities.write_in_a_thread,
                source_sha256="f0513982531c9214a41685ddfd94500adb5a4ffd8a7899b8dd413d26d89241d8",
                why="FastAPI looks at each number of an answer on the event loop",
            ),
            Hook(
                name="chats_are_written_in_threads",
                target="sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._handle_non_streaming_request",
                fn=log_probabilities.write_in_a_thread,
                source_sha256="3ccbd8e078e1820168d3fc96c1e35c2c8f2fc3f6865841524cdf1c2e25d5ff1d",
                why="so it does for chats",
            ),
        ),
    ),
    HookGroup(
        lacking="Token ids from a tokenizer without a limit of length",
        upstream="none; /v1/tokenize is a 500 for such a tokenizer, as Llama 2 and Mistral 7B have one",
        remove_when="/v1/tokenize answers with a length that fits 64 bits",
        hooks=(
            Hook(
                name="tokenizers_have_no_limit",
                target="sglang.srt.entrypoints.openai.serving_tokenize.TokenizeResponse",
                kind=HookKind.GLOBAL,
                fn=identity.length_fits_json,
                roles=frozenset({"prefill", "decode", "unified"}),
                source_sha256="f1791dbe89245cf80f2ae3c3f052e944c0b602deaf45909a31d2e4aabfc95711",
                why="the limit that transformers gives such a tokenizer, 10^30, cannot be written as JSON by SGLang",
            ),
        ),
    ),
    HookGroup(
        lacking="Packed adapters",
        upstream="none; SGLang reads what PEFT writes, tensor by tensor",
        remove_when="SGLang loads packed adapters without pausing batches, and serves ReFT",
        hooks=(
            Hook(
                name="adapters_are_packed",
                target="sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights",
                fn=packed.load_packed,
                roles=_ADAPTER_ROLES,
                source_sha256="ef1fca98439bf6246c97c04d2a948cf22de0336b5a334380a7c2e4af79d04b91",
                why="reading and stacking hundreds of tensors pauses all running requests; a packed file is mapped",
            ),
            Hook(
                name="unloading_is_quick",
                target="sglang.srt.lora.lora_manager.LoRAManager.unload_lora_adapter",
                fn=packed.unload,
                roles=_ADAPTER_ROLES,
                source_sha256="650049e4c9f8a5634d01c8ea0ef3232501c75c7ba4a2ccd6890314fbd9664c68",
                why="the mapped file must be released; and SGLang empties torch's caches for a log line: a GPU stalls",
            ),
            Hook(
                name="slots_are_filled_at_once",
                target="sglang.srt.lora.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer",
                fn=packed.fill_slot,
                roles=_ADAPTER_ROLES,
                source_sha256="15991929d901410ce5fad8b5b617b376d2076de14c18aabbf1791e0414608b07",
                why="filling a slot in hundreds of steps pauses the engine for 10 ms or more; ReFT uses the same slots",
            ),
            Hook(
                name="slots_are_cleared_at_once",
                target="sglang.srt.lora.mem_pool.LoRAMemoryPool._clear_buffer_slot_for_base",
                fn=packed.clear_slot,
                roles=_ADAPTER_ROLES,
                source_sha256="7be1c750bb9b1eb78979878262ab5d05d1f3b5f646f8625f1846cb8d6440daa5",
                why="an unload zeroes a slot in hundreds of steps: a seventh of the scheduler's time under cold loads",
            ),
        ),
    ),
    HookGroup(
        lacking="Concurrent loads and unloads",
        upstream="none; SGLang sends one load or unload, waits for its reply, then sends the next",
        remove_when="SGLang sends loads and unloads without waiting for the previous reply",
        hooks=(
            Hook(
                name="adapters_load_side_by_side",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
                fn=updates.update_side_by_side,
                roles=_ADAPTER_ROLES,
                source_sha256="54b217a0206797a57d687f1688792543e8009c34f0cdaa62617044f163b64242",
                why="SGLang loads one adapter per scheduler batch, so each cold adapter waits for those before it",
            ),
        ),
    ),
    HookGroup(
        lacking="Unloads that fail instead of waiting",
        upstream="none; SGLang waits until the adapter's requests end, and loads nothing meanwhile",
        remove_when="an unload can be refused while the adapter is in use, and late requests do not reload it",
        hooks=(
            Hook(
                name="idle_adapters_are_unloaded",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._unload_lora_adapter_locked",
                fn=uses.unload_only_what_is_idle,
                roles=_ADAPTER_ROLES,
                source_sha256="2040317f7862319d2c188e1bb6262afe7218ef4ff211983a52d2ef145fb1df26",
                why="while SGLang waits for one adapter, every other load waits too; we evict another adapter instead",
            ),
        ),
    ),
    HookGroup(
        lacking="Exact use counts of adapters",
        upstream="none; SGLang's count leaks when clients disconnect or prompts are refused",
        remove_when="SGLang counts a request from its adapter's lookup until the scheduler has finished it",
        hooks=(
            Hook(
                name="uses_are_noted",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora",
                fn=uses.note_use,
                roles=_ADAPTER_ROLES,
                source_sha256="8a23ac3263d71309617a16fc747057bb0187300514cd38662577cb9b28930b80",
                why="an adapter must not be unloaded under a request, from before the request looks it up",
            ),
            Hook(
                name="uses_end_with_requests",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output",
                fn=uses.forget_finished,
                roles=_ADAPTER_ROLES,
                source_sha256="9af0d3e113a22d6bb146d855f3f85e8131cdbd4f474454343b6703284274b722",
                why="a request ends when the scheduler reports it finished, even if its client has left",
            ),
            Hook(
                name="uses_end_with_aborts",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req",
                fn=uses.forget_aborted,
                roles=_ADAPTER_ROLES,
                source_sha256="0e828e95920865f5cec95543252d2125927ac74f975e381245ae8e16f8304d38",
                why="requests can be aborted before they start",
            ),
            Hook(
                name="uses_end_with_refusals",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._discard_pending_req_states",
                fn=uses.forget_undispatched,
                roles=_ADAPTER_ROLES,
                source_sha256="15972796ab3828d6ba6fce3c18b7556391b562f950f6cebbbb90a83c91bd926a",
                why="requests can be refused or cancelled before they reach the scheduler",
            ),
            Hook(
                name="sglang_counts_no_uses",
                target="sglang.srt.lora.lora_registry.LoRARegistry.release",
                fn=uses.count_nothing,
                roles=_ADAPTER_ROLES,
                source_sha256="02a599a476e0f2c0cca267720a0c0db9627095035235176c88d4e4310e5463fd",
                why="SGLang's release fails once the adapter is unloaded, and runs twice for some requests",
            ),
        ),
    ),
    HookGroup(
        lacking="ReFT adapters",
        upstream="none; SGLang serves LoRA only",
        remove_when="SGLang serves ReFT",
        hooks=(
            Hook(
                name="memory_pool_is_complemented",
                target="sglang.srt.lora.lora_manager.LoRAManager.init_memory_pool",
                kind=HookKind.AFTER,
                fn=memory_pool.complement_memory_pool,
                roles=_ADAPTER_ROLES,
                source_sha256="37c36162d83219a5e8f26fb3f704bd2b6570c0ae1017424490726002d591f276",
                why="ReFT factors need room beside the slots and a hook after each layer; packed files need a loader",
            ),
            Hook(
                name="reft_in_prefill_graphs",
                target="sglang.srt.lora.lora_manager.LoRAManager.init_prefill_cuda_graph_batch_info",
                kind=HookKind.AFTER,
                fn=reft.allow_reft_in_graphs,
                roles=_ADAPTER_ROLES,
                source_sha256="f6e9d10162acdfd250a27b29adc45e246fd0098eda141e1d2b211c54786a6bbd",
                why="prefill CUDA graphs record ReFT's kernels, which read a batch's slots from fixed addresses",
            ),
        ),
    ),
    HookGroup(
        lacking="An expand kernel with wide memory accesses",
        upstream="none; the csgmv expand kernel reads and writes single elements",
        remove_when="SGLang's csgmv expand kernel uses the alignment of its slices",
        hooks=(
            Hook(
                name="lora_expands_with_wide_accesses",
                target="sglang.srt.lora.backend.chunked_backend.chunked_sgmv_lora_expand_forward",
                kind=HookKind.GLOBAL,
                fn=lora_kernels.expand_with_wide_accesses,
                roles=_ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="e78d5eebc9d8369627242986f10de4ae7e948f54f3f2ba323138f73ede198bef",
                why="SGLang's kernel takes a third of all prefill time on an H200",
            ),
        ),
    ),
    HookGroup(
        lacking="A quick start on CPUs",
        upstream="none; each process of an engine is spawned and imports torch, transformers and SGLang again",
        remove_when="SGLang can fork its processes",
        hooks=(
            Hook(
                name="children_are_forked",
                target="sglang.srt.entrypoints.engine._set_envs_and_config",
                kind=HookKind.AFTER,
                fn=cpu.fork_children,
                platform=Platform.CPU,
                source_sha256="18138c830ae1a7535d8b0cfdae7da8cace04db7df1cfbe531881ef346117095d",
                why="imports are most of an engine's start on few cores; forked processes share them",
            ),
        ),
    ),
    HookGroup(
        lacking="Page-locked memory only where it exists",
        upstream="none; these places ask for page-locked memory unconditionally",
        remove_when="the place in question checks is_pin_memory_available() first",
        hooks=(
            Hook(
                name="lora_layers_do_not_pin",
                target="sglang.srt.lora.layers.torch",
                kind=HookKind.GLOBAL,
                fn=cpu.unpinned_torch,
                roles=_LORA_ROLES,
                platform=Platform.CPU,
                source_sha256="a1b456750dad3ffd06df417f949f14b196c6813a3991943073abe8ad307c6181",
                why="a CPU-only torch refuses page-locked memory, which the LoRA layers ask for",
            ),
            Hook(
                name="lora_backend_does_not_pin",
                target="sglang.srt.lora.backend.torch_backend.torch",
                kind=HookKind.GLOBAL,
                fn=cpu.unpinned_torch,
                roles=_LORA_ROLES,
                platform=Platform.CPU,
                source_sha256="2f2be4da44af150a66e9164485e83f0b0b819ff5160729c03a4c04a409d89c7e",
                why="the torch-native LoRA backend asks for it, too, for its batch metadata",
            ),
            Hook(
                name="pin_memory_is_identity",
                target="torch.Tensor.pin_memory",
                fn=cpu.pin_memory_is_identity,
                roles=_LORA_ROLES,
                platform=Platform.CPU,
                source_sha256="builtin",
                why="the LoRA backend also calls the method Tensor.pin_memory",
            ),
            Hook(
                name="grammar_masks_do_not_pin",
                target="sglang.srt.constrained.xgrammar_backend.torch",
                kind=HookKind.GLOBAL,
                fn=cpu.unpinned_torch,
                platform=Platform.CPU,
                source_sha256="2f924bdfd9881dd5f39d03055719cab78c4f1082f14b4c49d1d53e57cfcc38df",
                why="the grammar backend asks for it, too, for the token masks of JSON-schema output",
            ),
        ),
    ),
    HookGroup(
        lacking="KV buffers labelled by their device",
        upstream="none; SGLang labels every KV buffer as GPU memory",
        remove_when="SGLang labels KV buffers by the device that they are on",
        hooks=(
            Hook(
                name="kv_is_host_memory",
                target="sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds",
                fn=cpu.register_kv_as_dram,
                roles=_PAIR_ROLES,
                platform=Platform.CPU,
                source_sha256="d24095a7ec6b10dac71b8a8deb624f1ff5fe070ae92f47b06dd43150760b4444",
                why="on a CPU engine KV buffers are host memory, and NIXL must know",
            ),
        ),
    ),
    HookGroup(
        lacking="KV transfers between host memories of engines with different tensor parallel sizes",
        upstream="none; SGLang raises NotImplementedError unless decode's KV buffers are GPU memory",
        remove_when="NixlKVManager._prepare_payload_xfer accepts host memory for different tensor parallel sizes",
        hooks=(
            Hook(
                name="kv_is_cut_in_host_memory",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._prepare_payload_xfer",
                fn=cpu.cut_kv_in_host_memory,
                roles=frozenset({"prefill"}),
                platform=Platform.CPU,
                source_sha256="b09e3d3d20c7623724804f44329060fa9b0aebb281c40a5bd8f0a0c8cef438c5",
                why="CPU engines run the same cuts by heads as GPUs do, so that tests on CPUs cover them",
            ),
        ),
    ),
    HookGroup(
        lacking="A configurable NIXL progress thread",
        upstream="none; nixl_agent sets pthrDelay = 0 and takes no argument for it",
        remove_when="nixl_agent_config takes the delay",
        hooks=(
            Hook(
                name="kv_progress_thread_sleeps",
                target="nixl_cu13._api.nixlBind",
                kind=HookKind.GLOBAL,
                fn=cpu.patient_nixl_bindings,
                roles=_PAIR_ROLES,
                platform=Platform.CPU,
                source_sha256="79ac70eed826672f09a21df7e71c8646654e761961c9783ecd8e145c0a7149a7",
                why="NIXL's progress thread polls without pause, which takes a whole core even when idle",
            ),
        ),
    ),
    HookGroup(
        lacking="Grammar masks on a CPU",
        upstream="none; xgrammar has a CPU kernel, which SGLang does not call",
        remove_when="SGLang calls xgrammar's CPU kernel",
        hooks=(
            Hook(
                name="grammar_masks_on_cpu",
                target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
                fn=cpu.mask_vocabulary_on_cpu,
                platform=Platform.CPU,
                source_sha256="59743e0a87a1cf57688c79aa255fc2cf8c03ae0fd3e33075f09d9c42b92b3748",
                why="JSON-schema output raises 'Unsupported device: cpu' and ends the scheduler",
            ),
            Hook(
                name="grammar_backend_masks_on_cpu",
                target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
                fn=cpu.mask_vocabulary_on_cpu,
                platform=Platform.CPU,
                source_sha256="12c2700e3ca6554c6b0953bfe3a407976b07e50b935b38db26c39110cd9e816a",
                why="the same for batches, which are masked through the backend",
            ),
        ),
    ),
)

HOOKS: tuple[Hook, ...] = tuple(hook for group in GROUPS for hook in group.hooks)


def hooks_for(role: str, device: str) -> tuple[Hook, ...]:
    """The hooks that an engine of this role on this device ("cpu" or "cuda") must have."""
    return tuple(hook for hook in HOOKS if hook.applies_to(role, device))
