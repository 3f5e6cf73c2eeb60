"""Adapters: loads, uses, slots, kernels."""

from engine.hooks import lora_kernels, memory_pool, packed, reft, updates, uses
from engine.hooks.hook import ADAPTER_ROLES, Hook, HookGroup, HookKind, Platform

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="Packed adapters",
        remove_when="SGLang loads packed adapters without pausing batches, and serves ReFT",
        hooks=(
            Hook(
                name="adapters_are_packed",
                target="sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights",
                fn=packed.load_packed,
                roles=ADAPTER_ROLES,
                source_sha256="360d48baff881bab98fcf4376557c88ef5ace53022f0035ba618238b95cf3b21",
                why="reading and stacking hundreds of tensors pauses all running requests; a packed file is mapped",
            ),
            Hook(
                name="unloading_is_quick",
                target="sglang.srt.managers.scheduler.Scheduler.unload_lora_adapter",
                fn=uses.unload_unless_needed,
                roles=ADAPTER_ROLES,
                source_sha256="a1c3de01f0271f716acc4f1a7a3b212efee699f1e734ced9382943ca2e182bba",
                why="a request needs its adapter until its prompt is read, which the scheduler knows; the mapped file "
                "must be released; and SGLang empties torch's caches for a log line: a GPU stalls",
            ),
            Hook(
                name="slots_are_filled_at_once",
                target="sglang.srt.lora.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer",
                fn=packed.fill_slot,
                roles=ADAPTER_ROLES,
                source_sha256="3f432383c0dbb3e5f02a64345c29e209d7b69c293dcf425963ea593ad0b97aca",
                why="filling a slot in hundreds of steps pauses the engine for 10 ms or more; ReFT uses the same slots",
            ),
            Hook(
                name="slots_are_cleared_at_once",
                target="sglang.srt.lora.mem_pool.LoRAMemoryPool._clear_buffer_slot_for_base",
                fn=packed.clear_slot,
                roles=ADAPTER_ROLES,
                source_sha256="7be1c750bb9b1eb78979878262ab5d05d1f3b5f646f8625f1846cb8d6440daa5",
                why="an unload zeroes a slot in hundreds of steps: a seventh of the scheduler's time under cold loads",
            ),
        ),
    ),
    HookGroup(
        lacking="Concurrent loads and unloads",
        remove_when="SGLang sends loads and unloads without waiting for the previous reply",
        hooks=(
            Hook(
                name="adapters_load_side_by_side",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
                fn=updates.update_side_by_side,
                roles=ADAPTER_ROLES,
                source_sha256="cce8985c9335416dc830c993cb3e7fa0f67c9c95d568729f697c442a3e0cf49d",
                why="SGLang loads one adapter per scheduler batch, so each cold adapter waits for those before it",
            ),
        ),
    ),
    HookGroup(
        lacking="Unloads that fail instead of waiting",
        remove_when="an unload can be refused while the adapter is in use, and late requests do not reload it",
        hooks=(
            Hook(
                name="idle_adapters_are_unloaded",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin._unload_lora_adapter_locked",
                fn=uses.unload_only_what_is_idle,
                roles=ADAPTER_ROLES,
                source_sha256="932e288dc21e492ca476041b1ce2105b9a6f2a18378ea777a62f0ede82fe334b",
                why="while SGLang waits for one adapter, every other load waits too; we evict another adapter instead",
            ),
            Hook(
                name="loads_are_noted",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.load_lora_adapter",
                fn=uses.note_load,
                roles=ADAPTER_ROLES,
                source_sha256="8faca4c1fb9f594d6a52baa07f4d6168375572f22ddc74cb0b2ed950b4368964",
                why="a load's late reply registers an adapter that was unloaded meanwhile; a request for it is fatal",
            ),
        ),
    ),
    HookGroup(
        lacking="A status for adapters that are not loaded",
        remove_when="SGLang answers requests for them with a status of their own",
        hooks=(
            Hook(
                name="uses_are_noted",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_and_resolve_lora",
                fn=uses.note_lookup,
                roles=ADAPTER_ROLES,
                source_sha256="8a23ac3263d71309617a16fc747057bb0187300514cd38662577cb9b28930b80",
                why="a missing adapter needs a status that the router knows; SGLang would load it from a stale path",
            ),
        ),
    ),
    HookGroup(
        lacking="ReFT adapters",
        remove_when="SGLang serves ReFT",
        hooks=(
            Hook(
                name="memory_pool_is_complemented",
                target="sglang.srt.lora.lora_manager.LoRAManager.init_memory_pool",
                kind=HookKind.AFTER,
                fn=memory_pool.complement_memory_pool,
                roles=ADAPTER_ROLES,
                source_sha256="bb86d5a9b187d86d450ed2b13ed90d5e826dd00e63f7d93c6d690693b016edbd",
                why="ReFT factors need room beside the slots and a hook after each layer; packed files need a loader",
            ),
            Hook(
                name="segments_in_prefill_graphs",
                target="sglang.srt.lora.lora_manager.LoRAManager.init_prefill_cuda_graph_batch_info",
                fn=reft.allow_segments_in_graphs,
                roles=ADAPTER_ROLES,
                source_sha256="7f0c0f2937d8a4a815909ae93430c2349b5395bbcb7a80aa4b65fcc199bd2ce1",
                why="graphs have room for a batch's requests, of which segments are more; ReFT reads slots there, too",
            ),
        ),
    ),
    HookGroup(
        lacking="A largest rank of their own for experts",
        remove_when="SGLang has an option for it",
        hooks=(
            Hook(
                name="slots_of_experts_have_their_own_rank",
                target="sglang.srt.lora.mem_pool.LoRAMemoryPool.init_buffers",
                fn=memory_pool.room_for_experts,
                roles=ADAPTER_ROLES,
                source_sha256="d471c1ddd318ed43b91bdf5e7988ac21865137faa258a49549a7ceb386fcfadc",
                why="with 128 experts each slot takes gigabytes at attention's usual ranks",
            ),
        ),
    ),
    HookGroup(
        lacking="LoRA batches that are prepared while the GPU is busy",
        remove_when="SGLang prepares that batch only for adapters of lm_head, or from page-locked memory",
        hooks=(
            Hook(
                name="lm_head_gets_no_lora_batch",
                target="sglang.srt.lora.backend.chunked_backend.ChunkedSgmvLoRABackend._prepare_lm_head_batch_info",
                fn=lora_kernels.prepare_nothing_for_lm_head,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="c1e680417d0368b5a393248bc8467888c92f38605942703c3960c63a5ce48539",
                why="its copies wait for all earlier batches, so the GPU idles while the CPU prepares the next",
            ),
        ),
    ),
    HookGroup(
        lacking="Base experts in batches without LoRA on experts",
        remove_when="SGLang runs the base layer for batches whose adapters have nothing on experts",
        hooks=(
            Hook(
                name="experts_without_lora_run_in_their_base_layer",
                target="sglang.srt.lora.layers.FusedMoEWithLoRA.forward",
                fn=lora_kernels.run_experts,
                roles=ADAPTER_ROLES,
                source_sha256="c90029822270ea8da49af2c745b7f383711811ce9a8984b314810c0929cdb14e",
                why="most batches have none; and SGLang's runner for LoRA on experts needs a GPU",
            ),
        ),
    ),
    HookGroup(
        lacking="An expand kernel with wide memory accesses",
        remove_when="SGLang's csgmv expand kernel uses the alignment of its slices",
        hooks=(
            Hook(
                name="lora_expands_with_wide_accesses",
                target="sglang.srt.lora.backend.chunked_backend.chunked_sgmv_lora_expand_forward",
                kind=HookKind.GLOBAL,
                fn=lora_kernels.expand_with_wide_accesses,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="d0617e6467603dfab508f430854448ab6c8671813a5a208f10647ee1eb88ea7c",
                why="SGLang's kernel takes a third of all prefill time on an H200",
            ),
        ),
    ),
    HookGroup(
        lacking="A shrink kernel that keeps all multiprocessors busy",
        remove_when="SGLang's csgmv shrink kernel has as many programs as a GPU has multiprocessors",
        hooks=(
            Hook(
                name="lora_shrinks_on_all_multiprocessors",
                target="sglang.srt.lora.backend.chunked_backend.chunked_sgmv_lora_shrink_forward",
                kind=HookKind.GLOBAL,
                fn=lora_kernels.shrink_on_all_multiprocessors,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="d0617e6467603dfab508f430854448ab6c8671813a5a208f10647ee1eb88ea7c",
                why="a prompt of 2,048 tokens gives SGLang's kernel 16 to 48 programs, on 132 multiprocessors",
            ),
        ),
    ),
)
