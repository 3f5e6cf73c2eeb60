"""Bodies of the hooks that replace SGLang's LoRA kernels, and of one that prepares their batches without a wait.

On GPUs our shrink and expand kernels take the place of SGLang's, and the expand step of gate and up is left to the
activation after it (`engine.adapter_slots.gate_up`). On CPUs our products take that of SGLang's loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def expand_with_wide_accesses(_original):
    """Our kernel, which takes the same arguments."""
    from engine.adapter_slots.lora_expand import expand  # processes without triton read the ledger

    return expand


def shrink_on_all_multiprocessors(_original):
    """Our kernel, which takes the same arguments."""
    from engine.adapter_slots.lora_shrink import shrink  # processes without triton read the ledger

    return shrink


def prepare_nothing_for_lm_head(_original, _backend, *_args):
    """Neither batch nor passes for LoRA on lm_head, which no adapter has (`adapters.formats.peft.names` refuses it).

    SGLang makes both from lists by `torch.tensor(…, device=…)`, which waits until the GPU has run all that was launched
    before: the scheduler could prepare no prefill batch while the batch before it runs.
    """
    return None, None


def shrink_neighbours_at_once(_original):
    """Our product, which takes the same arguments."""
    from engine.adapter_slots.segment_products import shrink  # processes without torch read the ledger

    return shrink


def expand_neighbours_at_once(_original):
    """Our product, which takes the same arguments."""
    from engine.adapter_slots.segment_products import expand  # processes without torch read the ledger

    return expand


def skip_experts_without_lora(original, layer, hidden_states, topk_output, **kwargs):
    """Run SGLang's own layer of experts for a batch without LoRA on them, which needs none of SGLang's alignment."""
    if layer.lora_backend.prelude_experts.slot_of is None:
        return layer.base_layer.forward(hidden_states, topk_output, **kwargs)
    if layer.lora_backend.batch_info is None:  # then SGLang leaves LoRA out
        raise RuntimeError("a batch with LoRA on experts was not prepared: an adapter was not applied")
    return original(layer, hidden_states, topk_output, **kwargs)


# ---- gate and up ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _LeftStep:
    """An expand step between the projection and the activation of one MLP."""

    x: Any  # [T, 2 R], A x
    weights: Any  # [S, 2 d, R]
    batch_info: Any
    gate_up: Any  # [T, 2 d], the base model's output


_open: Any = None  # the MLP whose projection may leave its step
_left: _LeftStep | None = None


def join_expand_and_activation(original, mlp, x, *args, **kwargs):
    """Let the projection leave its step during a forward pass whose body calls the activation on its output."""
    global _open, _left
    activate = getattr(mlp.act_fn, "_forward_method", None)
    if getattr(activate, "__func__", None) is not type(mlp.act_fn).forward_cuda:  # else no hook is around it
        return original(mlp, x, *args, **kwargs)
    _open = mlp.gate_up_proj
    try:
        made = original(mlp, x, *args, **kwargs)
        if _left is not None:
            raise RuntimeError("the activation after gate and up did not run, so an adapter was not applied")
        return made
    finally:
        _open = _left = None


def leave_expand_to_activation(original, layer, base_output, x):
    """Compute A x and leave B (A x); return the base model's output."""
    global _left
    if layer is not _open or not _can_join(layer, base_output):
        return original(layer, base_output, x)
    from sglang.srt.lora.backend.chunked_backend import chunked_sgmv_lora_shrink_forward as shrink

    batch_info = layer.lora_backend.batch_info
    made = shrink(x=x, weights=layer.A_buffer, batch_info=batch_info, num_slices=2)
    _left = _LeftStep(made, layer.B_buffer, batch_info, base_output)
    return base_output


def expand_in_activation(original, activation, gate_up):
    """Add what the projection has left, if it has, and activate."""
    global _left
    if _left is None:
        return original(activation, gate_up)
    from engine.adapter_slots.gate_up import expand_and_activate  # processes without triton read the ledger

    step, _left = _left, None
    if step.gate_up is not gate_up:
        raise RuntimeError("the activation got another tensor than gate and up made, so an adapter was not applied")
    return expand_and_activate(step.x, step.weights, step.batch_info, gate_up)


def _can_join(layer, base_output) -> bool:
    """Whether the projection's output is gate and up, whole and dense."""
    return (
        layer.use_gate_up_lora
        and layer.lora_backend.name == "csgmv"
        and not layer.base_layer.gather_output
        and base_output.shape[-1] == layer.B_buffer.shape[-2]
        and base_output.is_contiguous()
    )
