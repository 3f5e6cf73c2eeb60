"""Bodies of the hooks by which ReFT rides on SGLang's LoRA: its files, registry, slots and batches."""

from __future__ import annotations

from adapters.serving import REFT_PREFIX
from engine.positions import Segment


def set_reft_tensors_aside(original, adapter, name: str, loaded_weight):
    """Keep ReFT tensors out of the LoRA layers, whose slots refuse names of modules that they do not know."""
    if not name.startswith(REFT_PREFIX):
        return original(adapter, name, loaded_weight)
    adapter.__dict__.setdefault("prelude_reft_tensors", {})[name] = loaded_weight
    return None


def fill_reft_slot(result, pool, uid, buffer_id, lora_adapter, *_args, **_kwargs):
    """When an adapter, or the base model, gets a slot, its ReFT gets the same one."""
    tensors = {} if lora_adapter is None else lora_adapter.__dict__.get("prelude_reft_tensors", {})
    from engine.reft import factors_of  # here, for the ledger is read by processes that have no torch

    reft = getattr(pool, "prelude_reft", None)
    if reft is not None:  # not yet there while the pool itself is made, with the base model only
        reft.fill(buffer_id, factors_of(tensors))
    return result


def add_reft_to_layers(result, manager):
    """Make the pool of ReFT factors, and have every decoder layer add its change to the residual stream."""
    from engine.reft import ReftPool

    layers = manager.base_model.model.layers
    pool = manager.memory_pool
    pool.prelude_reft = ReftPool(
        num_slots=manager.max_loras_per_batch,
        num_layers=len(layers),
        max_rank=manager.max_lora_rank,
        hidden=manager.base_hf_config.hidden_size,
        dtype=manager.dtype,
        device=manager.device,
    )
    for number, layer in enumerate(layers):
        layer.register_forward_hook(_layer_hook(manager, number))
    return result


def _layer_hook(manager, number: int):
    """What runs after decoder layer `number`, whose output is (hidden, residual)."""

    def hook(_layer, _args, output):
        if manager.memory_pool.prelude_reft.spans:
            hidden, residual = output
            manager.memory_pool.prelude_reft.apply(number, hidden, residual)

    return hook


def begin_batch(manager, segments: tuple[Segment, ...]) -> None:
    """Say where ReFT acts in the batch that runs next. Its adapters are in slots by now."""
    from engine.reft import spans_of

    pool = manager.memory_pool
    pool.prelude_reft.spans = spans_of(segments, pool.uid_to_buffer_id, lambda adapter: _has_reft(manager, adapter))


def _has_reft(manager, adapter: str) -> bool:
    return bool(manager.loras[adapter].__dict__.get("prelude_reft_tensors"))
