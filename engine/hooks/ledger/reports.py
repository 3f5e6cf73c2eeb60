"""Ids, reports and signs of life of engines."""

from engine.hooks import inspection, packed, updates
from engine.hooks.hook import ADAPTER_ROLES, OUR_ROLES, Hook, HookGroup, HookKind

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="Adapter ids chosen by the caller",
        remove_when="/load_lora_adapter accepts a lora_id",
        hooks=(
            Hook(
                name="revision_is_adapter_id",
                target="sglang.srt.managers.tokenizer_control_mixin.LoRARef",
                kind=HookKind.GLOBAL,
                fn=updates.name_is_id,
                roles=ADAPTER_ROLES,
                source_sha256="74c6834d7498484926a5161a295176ec752761502a7ff1811bb483a68821bef3",
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
        remove_when="SGLang reports loaded plugins and fails closed",
        hooks=(
            Hook(
                name="scheduler_reports_itself",
                target="sglang.srt.managers.scheduler.Scheduler.init_disaggregation",
                kind=HookKind.AFTER,
                fn=inspection.report_scheduler,
                source_sha256="aa5f946b54ea625eca0b4276bc079788d9e92db979d19d6ae4f2e1abb7ddf61f",
                why="readiness needs proof from each scheduler of its hooks, adapter tensors and prefix cache, in each "
                "role; and NIXL's KV manager gets an end, without which an engine keeps its role",
            ),
        ),
    ),
    HookGroup(
        lacking="Load reports that count the prompts being computed",
        remove_when="/v1/loads counts the requests of the batch that is running, and those whose KV is being sent",
        hooks=(
            Hook(
                name="prefill_is_published",
                target="sglang.srt.managers.scheduler.Scheduler.run_batch",
                fn=inspection.publish_prefill,
                roles=OUR_ROLES,
                source_sha256="4e9bb4d5e649e2f169fcc5d0621a2218d0046acc13d121e6065e41cca40ce495",
                why="a worker that drains would end while it computes a long prompt; also counts batches, as progress",
            ),
            Hook(
                name="prefill_is_counted",
                target="sglang.srt.managers.scheduler_components.load_inquirer.SchedulerLoadInquirer.get_loads",
                kind=HookKind.AFTER,
                fn=inspection.count_prefill,
                roles=OUR_ROLES,
                source_sha256="691cc40c75dd7134c7c57e1221078b4c01d90739e01fedba7d93071a7349a827",
                why="the published load must include the prompts being computed",
            ),
        ),
    ),
    HookGroup(
        lacking="Signs of life that cost nothing",
        remove_when="SGLang publishes the progress of its scheduler, its detokenizer and its KV thread",
        hooks=(
            Hook(
                name="scheduler_lives",
                target="sglang.srt.managers.scheduler.Scheduler.process_input_requests",
                kind=HookKind.AFTER,
                fn=inspection.live,
                roles=OUR_ROLES,
                source_sha256="b8c3ef031ea741a8b50b937cdd84fdcf59e2fce4f6cbd3cc6537225193e6a52f",
                why="every iteration of every event loop calls it, so its count shows a scheduler's progress",
            ),
            Hook(
                name="detokenizer_lives",
                target="sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_configure_logging_req",
                kind=HookKind.AFTER,
                fn=inspection.detokenizer_answers,
                roles=OUR_ROLES,
                source_sha256="74783ede97c30a8748e0d1a1aaf30c6c3befb9d4cb83b62523ded646d5634e15",
                why="it sleeps until it gets a message, so the scheduler sends one that changes nothing",
            ),
            Hook(
                name="kv_thread_lives",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._handle_abort_notification",
                fn=inspection.kv_thread_answers,
                roles=frozenset({"prefill"}),
                source_sha256="9894bb2265f3842755e4734936772acce3e92068e19f9c4c9f9e2e1ad692592e",
                why="a prefill engine whose KV thread has ended serves no request, but otherwise looks healthy",
            ),
        ),
    ),
)
