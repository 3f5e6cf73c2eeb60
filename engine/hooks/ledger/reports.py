"""Ids, reports and signs of life of engines."""

from __future__ import annotations

from engine.hooks import inspection, packed, updates
from engine.hooks.hook import ADAPTER_ROLES, OUR_ROLES, PAIR_ROLES, Hook, HookGroup, HookKind, Platform

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
                fn=updates.name_is_id,
                roles=ADAPTER_ROLES,
                source_sha256="beafef392c5f33e2785cc8aae6f60741ab81469f748ba2cac7b793aae1eedccd",
                why="an adapter's id is part of the prefix-cache key, so it must be the revision id",
            ),
            Hook(
                name="loading_twice_is_harmless",
                target="sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter",
                fn=packed.load_once,
                roles=ADAPTER_ROLES,
                source_sha256="0c26b29925354d10c2499bd49ab8aad73355aae5ff5fbd6142b29d6cae852e91",
                why="with stable ids, loading a resident adapter again fails an assertion and ends the scheduler; so "
                "does the first request for one that only some ranks could load",
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
                why="readiness needs proof from each scheduler of its hooks, its adapter tensors and its prefix cache",
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
                roles=PAIR_ROLES,
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
                roles=OUR_ROLES,
                source_sha256="af728442e936b53c6ffbc17d47d6e8d8686f0c2a4f80777bfc29f305ce9f7eda",
                why="a worker that drains would end while it computes a long prompt; also counts batches, as progress",
            ),
            Hook(
                name="prefill_is_counted",
                target="sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads",
                kind=HookKind.AFTER,
                fn=inspection.count_prefill,
                roles=OUR_ROLES,
                source_sha256="4930e6d5ed0145c50be483da79189da633a5cb40153df1a7713b3c26e56e9b5a",
                why="the published load must include the prompts being computed",
            ),
            Hook(
                name="prefill_is_counted_once",
                target="sglang.srt.managers.scheduler.Scheduler.process_batch_result",
                kind=HookKind.AFTER,
                fn=inspection.prefill_ended,
                roles=OUR_ROLES,
                source_sha256="2b92e6cdbfb7621326695b49adfb7e6f373bfbd99ca49c1574964e414a10b7a9",
                why="from this call on, SGLang counts these requests itself, so the hook must not",
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
                roles=OUR_ROLES,
                source_sha256="b28e433d094f04139840058d93eb755f4d839ca7dcab49354cf3a5ec404b128c",
                why="every iteration of every event loop calls it, so its count shows a scheduler's progress",
            ),
            Hook(
                name="layers_live",
                target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
                kind=HookKind.AFTER,
                fn=inspection.count_layers,
                roles=OUR_ROLES,
                platform=Platform.CPU,
                source_sha256="d2ba5b4a9650562927b3da4178d5ab4e3762e95b053689c24029a33902edb2ae",
                why="a batch may take minutes on a CPU; counting its layers shows whether it makes progress",
            ),
            Hook(
                name="detokenizer_lives",
                target="sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_configure_logging_req",
                kind=HookKind.AFTER,
                fn=inspection.detokenizer_answers,
                roles=OUR_ROLES,
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
                why="a prefill engine whose KV thread has ended serves no request, but otherwise looks healthy",
            ),
        ),
    ),
)
