"""Adapters: loads, uses, slots, kernels."""

from __future__ import annotations

from engine.hooks import lora_kernels, memory_pool, packed, reft, updates, uses
from engine.hooks.hook import Hook, HookGroup, HookKind, Platform
from engine.hooks.ledger.roles import ADAPTER_ROLES

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="Packed adapters",
        upstream="none; SGLang reads what PEFT writes, tensor by tensor",
        remove_when="SGLang loads packed adapters without pausing batches, and serves ReFT",
        hooks=(
            Hook(
                name="adapters_are_packed",
                target="sglang.srt.lora.lora_manager.LoRAManager.load_lora_weights",
                fn=packed.load_packed,
                roles=ADAPTER_ROLES,
                source_sha256="ef1fca98439bf6246c97c04d2a948cf22de0336b5a334380a7c2e4af79d04b91",
                why="reading and stacking hundreds of tensors pauses all running requests; a packed file is mapped",
            ),
            Hook(
                name="unloading_is_quick",
                target="sglang.srt.lora.lora_manager.LoRAManager.unload_lora_adapter",
                fn=packed.unload,
                roles=ADAPTER_ROLES,
                source_sha256="650049e4c9f8a5634d01c8ea0ef3232501c75c7ba4a2ccd6890314fbd9664c68",
                why="the mapped file must be released; and SGLang empties torch's caches for a log line: a GPU stalls",
            ),
            Hook(
                name="slots_are_filled_at_once",
                target="sglang.srt.lora.mem_pool.LoRAMemoryPool.load_lora_weight_to_buffer",
                fn=packed.fill_slot,
                roles=ADAPTER_ROLES,
                source_sha256="15991929d901410ce5fad8b5b617b376d2076de14c18aabbf1791e0414608b07",
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
        upstream="none; SGLang sends one load or unload, waits for its reply, then sends the next",
        remove_when="SGLang sends loads and unloads without waiting for the previous reply",
        hooks=(
            Hook(
                name="adapters_load_side_by_side",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
                fn=updates.update_side_by_side,
                roles=ADAPTER_ROLES,
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
                roles=ADAPTER_ROLES,
                source_sha256="2040317f7862319d2c188e1bb6262afe7218ef4ff211983a52d2ef145fb1df26",
                why="while SGLang waits for one adapter, every other load waits too; we evict another adapter instead",
            ),
            Hook(
                name="loads_are_noted",
                target="sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.load_lora_adapter",
                fn=uses.note_load,
                roles=ADAPTER_ROLES,
                source_sha256="5484b1f7956e7503970cfa13128372a320b736bca40e68b0dc6abba2a655c632",
                why="a load's late reply registers an adapter that was unloaded meanwhile; a request for it is fatal",
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
                roles=ADAPTER_ROLES,
                source_sha256="8a23ac3263d71309617a16fc747057bb0187300514cd38662577cb9b28930b80",
                why="an adapter must not be unloaded under a request, from before the request looks it up",
            ),
            Hook(
                name="uses_end_with_requests",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output",
                fn=uses.forget_finished,
                roles=ADAPTER_ROLES,
                source_sha256="9af0d3e113a22d6bb146d855f3f85e8131cdbd4f474454343b6703284274b722",
                why="a request ends when the scheduler reports it finished, even if its client has left",
            ),
            Hook(
                name="uses_end_with_aborts",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req",
                fn=uses.forget_aborted,
                roles=ADAPTER_ROLES,
                source_sha256="0e828e95920865f5cec95543252d2125927ac74f975e381245ae8e16f8304d38",
                why="requests can be aborted before they start",
            ),
            Hook(
                name="uses_end_with_refusals",
                target="sglang.srt.managers.tokenizer_manager.TokenizerManager._discard_pending_req_states",
                fn=uses.forget_undispatched,
                roles=ADAPTER_ROLES,
                source_sha256="15972796ab3828d6ba6fce3c18b7556391b562f950f6cebbbb90a83c91bd926a",
                why="requests can be refused or cancelled before they reach the scheduler",
            ),
            Hook(
                name="sglang_counts_no_uses",
                target="sglang.srt.lora.lora_registry.LoRARegistry.release",
                fn=uses.count_nothing,
                roles=ADAPTER_ROLES,
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
                roles=ADAPTER_ROLES,
                source_sha256="37c36162d83219a5e8f26fb3f704bd2b6570c0ae1017424490726002d591f276",
                why="ReFT factors need room beside the slots and a hook after each layer; packed files need a loader",
            ),
            Hook(
                name="reft_in_prefill_graphs",
                target="sglang.srt.lora.lora_manager.LoRAManager.init_prefill_cuda_graph_batch_info",
                kind=HookKind.AFTER,
                fn=reft.allow_reft_in_graphs,
                roles=ADAPTER_ROLES,
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
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="e78d5eebc9d8369627242986f10de4ae7e948f54f3f2ba323138f73ede198bef",
                why="SGLang's kernel takes a third of all prefill time on an H200",
            ),
        ),
    ),
    HookGroup(
        lacking="An expand step of gate and up that costs no memory traffic of its own",
        upstream="none; the expand step reads and writes what the activation then reads again",
        remove_when="SGLang joins the expand step of gate and up with the activation",
        hooks=(
            Hook(
                name="llama_joins_expand_and_activation",
                target="sglang.srt.models.llama.LlamaMLP.forward",
                fn=lora_kernels.join_expand_and_activation,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="682b54dac399f5fe5c53d30c889c015f002322a7873d69b59e2d437b7b22b7b1",
                why="in this body the activation follows on gate and up's output; Mistral's models use it, too",
            ),
            Hook(
                name="qwen_joins_expand_and_activation",
                target="sglang.srt.models.qwen2.Qwen2MLP.forward",
                fn=lora_kernels.join_expand_and_activation,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="b99edb0cd1b78f7a6d0f8f0288b919441f38a7671007b5638a7d8fbf16c2343f",
                why="in this body the activation follows on gate and up's output; Qwen3's dense models use it, too",
            ),
            Hook(
                name="gate_and_up_leave_their_expand_step",
                target="sglang.srt.lora.layers.MergedColumnParallelLinearWithLoRA.apply_lora",
                fn=lora_kernels.leave_expand_to_activation,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="db3bf5064bc126a47b0b39b28098f6c29fad5f4e89f04910da1f3530d2566e47",
                why="gate and up have two thirds of the columns that LoRA reads and writes in an 8B model",
            ),
            Hook(
                name="silu_expands_what_was_left",
                target="sglang.srt.layers.activation.SiluAndMul.forward_cuda",
                fn=lora_kernels.expand_in_activation,
                roles=ADAPTER_ROLES,
                platform=Platform.GPU,
                source_sha256="bb5451a8d8e00e29ada2df89f7c3a3664f4514e8eda851e7480ff1077465f995",
                why="SiLU reads all of gate and up; the expand step joined with it needs no traffic of its own",
            ),
        ),
    ),
)
