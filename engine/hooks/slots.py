"""Bodies of the hooks by which an adapter's slot is filled at once, and its ReFT with it."""

from __future__ import annotations

from typing import Any

from engine.hooks.reft import fill_reft_slot

# While SGLang fills a slot for the first time with an adapter: its copies, as (view of a buffer, weight).
_copies: list[tuple[Any, Any]] | None = None


def recorded_copies(copy_weight_into_buffer):
    """SGLang's own copy function, whose calls can be recorded."""

    def copy(buffer_view, weight):
        if _copies is not None:
            _copies.append((buffer_view, weight))
        return copy_weight_into_buffer(buffer_view, weight)

    return copy


def fill_slot(original, pool, uid, buffer_id, lora_adapter, *args, **kwargs):
    """Fill a slot as SGLang does the first time that an adapter needs one, from its image after that."""
    global _copies
    if lora_adapter is None:  # the base model
        original(pool, uid, buffer_id, lora_adapter, *args, **kwargs)
    else:
        own = lora_adapter.__dict__
        image = own.get("prelude_slot_image")
        if image is not None:
            pool.prelude_slot_filler.fill(buffer_id, image)
        else:
            _copies = []
            try:
                original(pool, uid, buffer_id, lora_adapter, *args, **kwargs)
                own["prelude_slot_image"] = _image(pool, buffer_id, lora_adapter, _copies)
            finally:
                _copies = None
            if own["prelude_slot_image"] is not None:
                for layer in lora_adapter.layers:  # the image has them now
                    layer.weights.clear()
                    layer.pinned_weights.clear()
    fill_reft_slot(pool, buffer_id, lora_adapter)


def _image(pool, buffer_id: int, lora_adapter, copies):
    """None for what an image does not hold: experts' and embeddings' weights, whose slots are filled otherwise."""
    if lora_adapter.embedding_layers or any(name.endswith("_moe") for name in pool.A_buffer):
        return None
    return pool.prelude_slot_filler.image_of(buffer_id, copies)


def make_slot_filler(pool) -> None:
    """Before KV is sized, since it takes device memory for one image."""
    from engine.slot_images import SlotFiller  # here, for the ledger is read by processes that have no torch

    buffers = [tensor for part in (pool.A_buffer, pool.B_buffer) for each in part.values() for tensor in each]
    pool.prelude_slot_filler = SlotFiller(buffers)
