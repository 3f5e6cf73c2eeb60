"""Bodies of the hooks that load packed adapters, fill slots with them and unload them."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.step_times import timed

log = logging.getLogger(__name__)


def load_packed(original, manager, lora_ref) -> None:
    """Map a packed file. SGLang would read and stack hundreds of tensors while no batch runs."""
    loader = manager.memory_pool.prelude_packed
    with timed("load"):
        manager.loras[lora_ref.lora_id] = loader.load(Path(lora_ref.lora_path), manager.configs[lora_ref.lora_id])


def load_once(original, manager, lora_ref):
    """Load a revision on all tensor-parallel ranks or on none, unless it is loaded: the same id means the same content.

    SGLang answers for the first rank alone, and the first request for a revision that another rank lacks would end the
    engine. Bypasses its logging of free device memory, for which it empties torch's caches.
    """
    if lora_ref.lora_id in manager.loras:
        result = manager.create_lora_update_result(success=True)
    else:
        result = manager._load_lora_adapter(lora_ref)
    if not result.success:
        log.warning("%s cannot be loaded: %s", lora_ref, result.error_message)
        manager.configs.pop(lora_ref.lora_id, None)
    on_all_ranks = _all_agree(result.success)
    if on_all_ranks or not result.success:
        return result
    unload(manager, lora_ref)
    return manager.create_lora_update_result(
        success=False, error_message="another tensor-parallel rank of the engine cannot load it; its log says why"
    )


def _all_agree(is_loaded: bool) -> bool:
    """Whether it is loaded on each rank. All ranks must ask."""
    import torch
    import torch.distributed as dist

    group = _ranks()
    if dist.get_world_size(group) == 1:
        return is_loaded
    loaded = torch.tensor(int(is_loaded))
    dist.all_reduce(loaded, op=dist.ReduceOp.MIN, group=group)
    return bool(loaded)


def _ranks():
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_group.cpu_group


def unload(manager, lora_ref):
    """Unload a revision if it is loaded and release its file. Bypasses the same logging."""
    adapter = manager.loras.get(lora_ref.lora_id)
    if adapter is None:
        return manager.create_lora_update_result(success=True)
    result = manager._unload_lora_adapter(lora_ref)
    if result.success:
        manager.memory_pool.prelude_packed.unload(adapter)
    return result


def fill_slot(original, pool, uid, buffer_id, lora_adapter, *args, **kwargs) -> None:
    """Fill a slot's LoRA and ReFT factors from an adapter's mapped file."""
    loader = getattr(pool, "prelude_packed", None)
    if loader is None:  # SGLang constructs the pool and fills a slot for the base model
        original(pool, uid, buffer_id, lora_adapter, *args, **kwargs)
        return
    with timed("fill"), loader.stream.writing(buffer_id):
        if lora_adapter is None:  # the base model
            original(pool, uid, buffer_id, lora_adapter, *args, **kwargs)
        else:
            loader.filler.fill(buffer_id, lora_adapter.image)
        pool.prelude_reft.fill(buffer_id, None if lora_adapter is None else lora_adapter.reft)
        if lora_adapter is not None:
            loader.note_filled(lora_adapter)


def clear_slot(original, pool, slot: int) -> None:
    """Zero an unloaded adapter's slot in grouped steps: SGLang takes one per matrix, hundreds of them."""
    loader = getattr(pool, "prelude_packed", None)
    if loader is None:
        original(pool, slot)
        return
    others = (
        pool.embedding_A_buffer, pool.embedding_B_buffer,
        pool.lm_head_A_buffer, pool.lm_head_B_buffer, pool.new_embeddings_buffer,
    )  # fmt: skip
    with timed("clear"), loader.stream.writing(slot):
        if any(others):
            original(pool, slot)
        else:
            loader.filler.clear(slot)


@contextmanager
def fills_of_a_batch(pool, adapters: Collection[str | None]) -> Iterator[None]:
    """Around SGLang's fills for a batch that reads the slots of `adapters`, before the batch is launched."""
    loader = getattr(pool, "prelude_packed", None)
    if loader is None:  # SGLang constructs the pool
        yield
        return
    loader.stream.begin_batch()
    yield
    loader.stream.end_fills(pool.uid_to_buffer_id[adapter] for adapter in adapters)


def make_packed_loader(manager) -> None:
    """Attach a loader to the memory pool. Runs before KV is sized, since it takes device memory for one image."""
    from sglang.srt.runtime_context import get_server_args

    from adapters.model.base_model import BaseModel
    from engine.adapter_slots.packed_adapters import PackedLoader  # the ledger is read without torch

    pool = manager.memory_pool
    base = BaseModel.read(get_server_args().model_path)
    buffers = {
        (module, factor, layer): buffer
        for factor, part in (("a", pool.A_buffer), ("b", pool.B_buffer))
        for module, layers in part.items()
        for layer, buffer in enumerate(layers)
    }
    shares = _shares_of_this_rank(manager, base) if pool.tp_size > 1 else None
    pool.prelude_packed = PackedLoader(buffers, base, pool.max_lora_rank, shares)


def _shares_of_this_rank(manager, base):
    from adapters.packed.fused_layout import EXPERT_PARTS_OF
    from engine.adapter_slots.slot_places import expert_share_of, share_of

    pool, shares = manager.memory_pool, {}
    wrapped = {name.rsplit(".", 1)[-1]: module for name, module in manager.lora_modules[0].items()}
    for module in pool.A_buffer:
        if module in EXPERT_PARTS_OF:
            shape = base.expert_shape_of(module.removesuffix("_moe"))
            shares[module] = expert_share_of(wrapped["experts"], module, pool.moe_tp_rank, *shape)
        else:
            shares[module] = share_of(wrapped[module], *base.shape_of(module))
    return shares
