"""Bodies of the hooks that replace SGLang's LoRA kernels, and of one that prepares their batches without a wait.

On GPUs our shrink and expand kernels take the place of SGLang's.
"""

from engine.hooks.cpu import run_experts_in_base_layer


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


def run_experts(original, layer, hidden_states, topk_output, **kwargs):
    """Run SGLang's own layer of experts for a batch without LoRA on them, which needs none of SGLang's alignment."""
    if layer.lora_backend.prelude_experts.slot_of is None:
        return layer.base_layer.forward(hidden_states, topk_output, **kwargs)
    if hidden_states.device.type == "cpu":
        return run_experts_in_base_layer(layer, hidden_states, topk_output, **kwargs)
    if layer.lora_backend.batch_info is None:  # then SGLang leaves LoRA out
        raise RuntimeError("a batch with LoRA on experts was not prepared: an adapter was not applied")
    return original(layer, hidden_states, topk_output, **kwargs)
