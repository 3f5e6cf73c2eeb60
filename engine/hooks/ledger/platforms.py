"""CPUs, and KV transfers of any device."""

from __future__ import annotations

from engine.hooks import cpu
from engine.hooks.hook import ADAPTER_ROLES, LORA_ROLES, TRANSFER_ROLES, Hook, HookGroup, HookKind, Platform
from engine.hooks.kv import progress

GROUPS: tuple[HookGroup, ...] = (
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
                roles=LORA_ROLES,
                platform=Platform.CPU,
                source_sha256="a1b456750dad3ffd06df417f949f14b196c6813a3991943073abe8ad307c6181",
                why="a CPU-only torch refuses page-locked memory, which the LoRA layers ask for",
            ),
            Hook(
                name="lora_backend_does_not_pin",
                target="sglang.srt.lora.backend.torch_backend.torch",
                kind=HookKind.GLOBAL,
                fn=cpu.unpinned_torch,
                roles=LORA_ROLES,
                platform=Platform.CPU,
                source_sha256="2f2be4da44af150a66e9164485e83f0b0b819ff5160729c03a4c04a409d89c7e",
                why="the torch-native LoRA backend asks for it, too, for its batch metadata",
            ),
            Hook(
                name="pin_memory_is_identity",
                target="torch.Tensor.pin_memory",
                fn=cpu.pin_memory_is_identity,
                roles=LORA_ROLES,
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
        lacking="KV in pages of several tokens on a CPU",
        upstream="none; SGLang's allocator of pages calls two Triton kernels",
        remove_when="PagedTokenToKVPoolAllocator has a path without Triton",
        hooks=(
            Hook(
                name="prompts_get_pages",
                target="sglang.srt.mem_cache.allocator.paged.alloc_extend_kernel",
                kind=HookKind.GLOBAL,
                fn=cpu.kernel_for_prompts,
                platform=Platform.CPU,
                source_sha256="82dab7eebd3c3610ce79b8a8651ca5b339ff854a425451fcf309cb55996d909a",
                why="so that tests without a GPU have the pages that prefill and decode engines have on one",
            ),
            Hook(
                name="next_tokens_get_pages",
                target="sglang.srt.mem_cache.allocator.paged.alloc_decode_kernel",
                kind=HookKind.GLOBAL,
                fn=cpu.kernel_for_next_tokens,
                platform=Platform.CPU,
                source_sha256="82dab7eebd3c3610ce79b8a8651ca5b339ff854a425451fcf309cb55996d909a",
                why="the same, one token per sequence",
            ),
        ),
    ),
    HookGroup(
        lacking="LoRA on experts on a CPU",
        upstream="none; SGLang's runner for it is Triton's",
        remove_when="SGLang runs LoRA on experts without Triton",
        hooks=(
            Hook(
                name="experts_are_adapted",
                target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
                fn=cpu.add_lora_to_experts,
                roles=ADAPTER_ROLES,
                platform=Platform.CPU,
                source_sha256="e94e6fac5846d0a03cf2186040a839e71e6459c13084230d963cfbbb920f6dbf",
                why="LoRA changes what is between an expert's products; base tokens keep the bits that this body gives",
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
                roles=TRANSFER_ROLES,
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
                fn=progress.patient,
                roles=TRANSFER_ROLES,
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
                fn=cpu.mask_vocabulary,
                platform=Platform.CPU,
                source_sha256="59743e0a87a1cf57688c79aa255fc2cf8c03ae0fd3e33075f09d9c42b92b3748",
                why="JSON-schema output raises 'Unsupported device: cpu' and ends the scheduler",
            ),
        ),
    ),
)
