"""Bodies of the hooks that only a CPU engine needs."""

import multiprocessing
import types
from collections.abc import Callable
from typing import Any

from engine.hooks.hook import module_with


def fork_children(_result, _server_args) -> None:
    """Have the engine's other processes forked, so that they need not import everything again.

    With a GPU they must be spawned: CUDA does not survive a fork.
    """
    multiprocessing.set_start_method("fork", force=True)


def unpinned_torch(torch: Any) -> types.ModuleType:
    """`torch` for one module, without page-locked memory, which a CPU-only build refuses."""

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    return module_with(torch, tensor=unpinned(torch.tensor), full=unpinned(torch.full), zeros=unpinned(torch.zeros))


def pin_memory_is_identity(original, tensor, *_args, **_kwargs):
    """Return the tensor as it is: without an accelerator, page-locking has no use."""
    return tensor


def register_kv_as_dram(original, _kinds, expected_len: int):
    """Label every KV buffer as host memory."""
    return original(["DRAM"] * expected_len, expected_len)


def cut_kv_in_host_memory(original, manager, peer):
    """Prepare transfers by heads between host memories, which SGLang prepares between GPUs only."""
    if peer.decode_tp_size == manager.attn_tp_size:
        return original(manager, peer)
    peer.dst_homogeneous_mem_kind = manager.src_mem_kind
    return manager._init_hetero_tp_prep_handle(
        peer.agent_name, peer, src_mem_kind=manager.src_mem_kind, dst_mem_kind=manager.src_mem_kind
    )


# The layer whose experts SGLang is about to run, with LoRA in this batch.
_adapted_layer: Any = None


def run_experts_in_base_layer(layer, hidden_states, topk_output, **kwargs):
    """Run the layer without SGLang's kernels for LoRA, which need a GPU; `add_lora_to_experts` adds it inside."""
    global _adapted_layer
    _adapted_layer = layer
    try:
        made = layer.base_layer.forward(hidden_states, topk_output, **kwargs)
        if _adapted_layer is not None:
            raise RuntimeError("SGLang did not run experts where LoRA is added to them: an adapter was not applied")
        return made
    finally:
        _adapted_layer = None


def add_lora_to_experts(original, base_layer, x, topk_output, moe_runner_config):
    """Run a layer's experts with each token's LoRA on them."""
    global _adapted_layer
    layer, _adapted_layer = _adapted_layer, None
    if layer is None or not len(x):
        return original(base_layer, x, topk_output, moe_runner_config)
    from engine.adapter_slots.experts import ExpertBuffers, run_experts

    buffers = ExpertBuffers(
        layer.gate_up_lora_a_weights, layer.gate_up_lora_b_weights, layer.down_lora_a_weights, layer.down_lora_b_weights
    )
    shares, chosen, _ = topk_output
    slot_of = layer.lora_backend.prelude_experts.slot_of
    return run_experts(x, chosen, shares, base_layer.w13_weight, base_layer.w2_weight, buffers, slot_of)
