"""CPUs, and KV transfers of any device."""

from engine.hooks import cpu
from engine.hooks.hook import ADAPTER_ROLES, LORA_ROLES, TRANSFER_ROLES, Hook, HookGroup, HookKind, Platform
from engine.hooks.kv import connections

GROUPS: tuple[HookGroup, ...] = (
    HookGroup(
        lacking="A quick start on CPUs",
        remove_when="SGLang can fork its processes",
        hooks=(
            Hook(
                name="children_are_forked",
                target="sglang.srt.entrypoints.engine._set_envs_and_config",
                kind=HookKind.AFTER,
                fn=cpu.fork_children,
                platform=Platform.CPU,
                source_sha256="b3ddd8a51c625a1176fcab22319c1a6dac9187c5576da9b0b3f6ef31c5c94a94",
                why="imports are most of an engine's start on few cores; forked processes share them",
            ),
        ),
    ),
    HookGroup(
        lacking="Page-locked memory only where it exists",
        remove_when="the place in question checks is_pin_memory_available() first",
        hooks=(
            Hook(
                name="lora_layers_do_not_pin",
                target="sglang.srt.lora.layers.torch",
                kind=HookKind.GLOBAL,
                fn=cpu.unpinned_torch,
                roles=LORA_ROLES,
                platform=Platform.CPU,
                source_sha256="e99ad701df5e64f19720826a564cca4b1eff90308390123a920f347c79999a23",
                why="a CPU-only torch refuses page-locked memory, which the LoRA layers ask for",
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
        ),
    ),
    HookGroup(
        lacking="LoRA on experts on a CPU",
        remove_when="SGLang runs LoRA on experts without Triton",
        hooks=(
            Hook(
                name="experts_are_adapted",
                target="sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
                fn=cpu.add_lora_to_experts,
                roles=ADAPTER_ROLES,
                platform=Platform.CPU,
                source_sha256="53b7e13072dbf34488e8a461eda07f378e25b2da3fe57205d126ced4878745da",
                why="LoRA changes what is between an expert's products; base tokens keep the bits that this body gives",
            ),
        ),
    ),
    HookGroup(
        lacking="KV buffers labelled by their device",
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
        remove_when="NixlKVManager._prepare_payload_xfer accepts host memory for different tensor parallel sizes",
        hooks=(
            Hook(
                name="kv_is_cut_in_host_memory",
                target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._prepare_payload_xfer",
                fn=cpu.cut_kv_in_host_memory,
                roles=frozenset({"prefill"}),
                platform=Platform.CPU,
                source_sha256="8c799fcb4100fb7f374a5616cf13187b0c118acd8ba0bc603d3a378b3215a5d5",
                why="CPU engines run the same cuts by heads as GPUs do, so that tests on CPUs cover them",
            ),
        ),
    ),
    HookGroup(
        lacking="A configurable NIXL progress thread",
        remove_when="nixl_agent_config takes the delay",
        hooks=(
            Hook(
                name="kv_progress_thread_sleeps",
                target="nixl_cu13._api.nixlBind",
                kind=HookKind.GLOBAL,
                fn=connections.patient,
                roles=TRANSFER_ROLES,
                source_sha256="79ac70eed826672f09a21df7e71c8646654e761961c9783ecd8e145c0a7149a7",
                why="NIXL's progress thread polls without pause, which takes a whole core even when idle",
            ),
        ),
    ),
)
