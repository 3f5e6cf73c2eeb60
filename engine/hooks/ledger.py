"""The ledger: every hook of Prelude into SGLang. The table in docs/sglang-hooks.md is made from it."""

from __future__ import annotations

from engine.hooks import cpu, identity, inspection
from engine.hooks.hook import Hook, HookKind, Platform

_ADAPTER_ROLES = frozenset({"prefill", "unified"})
_LORA_ROLES = frozenset({"prefill", "unified", "stock"})
_PAIR_ROLES = frozenset({"prefill", "decode"})

HOOKS: tuple[Hook, ...] = (
    Hook(
        name="revision_is_adapter_id",
        target="sglang.srt.managers.tokenizer_control_mixin.LoRARef",
        kind=HookKind.GLOBAL,
        fn=identity.name_is_id,
        roles=_ADAPTER_ROLES,
        source_sha256="beafef392c5f33e2785cc8aae6f60741ab81469f748ba2cac7b793aae1eedccd",
        why="an adapter's id is part of the prefix-cache key, so it must be the revision id, not a random one per load",
        upstream="none: SGLang draws a random id at each load",
        remove_when="/load_lora_adapter accepts a lora_id",
    ),
    Hook(
        name="loading_twice_is_harmless",
        target="sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter",
        kind=HookKind.AROUND,
        fn=identity.load_once,
        roles=_ADAPTER_ROLES,
        source_sha256="0c26b29925354d10c2499bd49ab8aad73355aae5ff5fbd6142b29d6cae852e91",
        why="with ids that are not random, loading a resident adapter again fails an assertion and ends the scheduler",
        upstream="none: random ids cannot collide",
        remove_when="revision_is_adapter_id is removed",
    ),
    Hook(
        name="scheduler_reports_itself",
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
        kind=HookKind.AFTER,
        fn=inspection.report_scheduler,
        source_sha256="ff0eddbe87205963e151a85d7dab574d19dba878e3ffa213867e4b729706d457",
        why="readiness needs proof, from each scheduler, of its hooks and of whether it holds adapter tensors",
        upstream="none: the plugin loader only logs when a plugin fails",
        remove_when="SGLang reports loaded plugins and fails closed",
    ),
    Hook(
        name="waiting_is_visible",
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        kind=HookKind.AFTER,
        fn=inspection.publish_while_waiting,
        roles=_PAIR_ROLES,
        source_sha256="a6e5e6adff8f370e03ffc815766b27840cd4ae2d43617305e95dfd874112cff2",
        why="requests that wait for their peer or for KV run no batch, and load is published only after batches",
        upstream="none: /v1/loads shows empty queues meanwhile",
        remove_when="the scheduler publishes its load while it waits",
    ),
    Hook(
        name="lora_layers_do_not_pin",
        target="sglang.srt.lora.layers.torch",
        kind=HookKind.GLOBAL,
        fn=cpu.unpinned_torch,
        roles=_LORA_ROLES,
        platform=Platform.CPU,
        source_sha256="a1b456750dad3ffd06df417f949f14b196c6813a3991943073abe8ad307c6181",
        why="a CPU-only torch refuses page-locked memory, which the LoRA layers ask for unconditionally",
        upstream="none",
        remove_when="the LoRA layers ask is_pin_memory_available() first",
    ),
    Hook(
        name="lora_backend_does_not_pin",
        target="sglang.srt.lora.backend.torch_backend.torch",
        kind=HookKind.GLOBAL,
        fn=cpu.unpinned_torch,
        roles=_LORA_ROLES,
        platform=Platform.CPU,
        source_sha256="2f2be4da44af150a66e9164485e83f0b0b819ff5160729c03a4c04a409d89c7e",
        why="as lora_layers_do_not_pin, for the batch metadata of the torch-native backend",
        upstream="none",
        remove_when="the backend asks is_pin_memory_available() first",
    ),
    Hook(
        name="pin_memory_is_identity",
        target="torch.Tensor.pin_memory",
        kind=HookKind.AROUND,
        fn=cpu.pin_memory_is_identity,
        roles=_LORA_ROLES,
        platform=Platform.CPU,
        source_sha256="builtin",
        why="as lora_layers_do_not_pin, for the method form",
        upstream="none",
        remove_when="the LoRA backend asks is_pin_memory_available() first",
    ),
    Hook(
        name="kv_is_host_memory",
        target="sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds",
        kind=HookKind.AROUND,
        fn=cpu.register_kv_as_dram,
        roles=_PAIR_ROLES,
        platform=Platform.CPU,
        source_sha256="d24095a7ec6b10dac71b8a8deb624f1ff5fe070ae92f47b06dd43150760b4444",
        why="SGLang tells NIXL that KV buffers are GPU memory; on a CPU engine they are host memory",
        upstream="none",
        remove_when="SGLang labels KV buffers by the device they are on",
    ),
    Hook(
        name="kv_progress_thread_sleeps",
        target="nixl_cu13._api.nixlBind",
        kind=HookKind.GLOBAL,
        fn=cpu.patient_nixl_bindings,
        roles=_PAIR_ROLES,
        platform=Platform.CPU,
        source_sha256="79ac70eed826672f09a21df7e71c8646654e761961c9783ecd8e145c0a7149a7",
        why="NIXL's Python API has its progress thread poll without pause: a whole core, also when idle",
        upstream="none: nixl_agent sets pthrDelay = 0 and offers no argument for it",
        remove_when="nixl_agent_config takes the delay",
    ),
    Hook(
        name="grammar_masks_do_not_pin",
        target="sglang.srt.constrained.xgrammar_backend.torch",
        kind=HookKind.GLOBAL,
        fn=cpu.unpinned_torch,
        platform=Platform.CPU,
        source_sha256="2f924bdfd9881dd5f39d03055719cab78c4f1082f14b4c49d1d53e57cfcc38df",
        why="as lora_layers_do_not_pin, for the token masks of JSON-schema output",
        upstream="none",
        remove_when="the grammar backend asks is_pin_memory_available() first",
    ),
    Hook(
        name="grammar_masks_on_cpu",
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        kind=HookKind.AROUND,
        fn=cpu.mask_vocabulary_on_cpu,
        platform=Platform.CPU,
        source_sha256="59743e0a87a1cf57688c79aa255fc2cf8c03ae0fd3e33075f09d9c42b92b3748",
        why="JSON-schema output raises 'Unsupported device: cpu' and kills the scheduler",
        upstream="none: xgrammar itself has a CPU kernel",
        remove_when="SGLang calls it",
    ),
    Hook(
        name="grammar_backend_masks_on_cpu",
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
        kind=HookKind.AROUND,
        fn=cpu.mask_vocabulary_on_cpu,
        platform=Platform.CPU,
        source_sha256="12c2700e3ca6554c6b0953bfe3a407976b07e50b935b38db26c39110cd9e816a",
        why="as grammar_masks_on_cpu, for batches masked through the backend",
        upstream="none: xgrammar itself has a CPU kernel",
        remove_when="SGLang calls it",
    ),
)


def hooks_for(role: str, device: str) -> tuple[Hook, ...]:
    """The hooks that an engine of this role on this device ("cpu" or "cuda") must have."""
    return tuple(hook for hook in HOOKS if hook.applies_to(role, device))
