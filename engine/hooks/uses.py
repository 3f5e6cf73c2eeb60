"""Bodies of the hooks by which the engine's server knows which adapters its requests use.

SGLang counts, too, but its count does not go down for every request: not where a client leaves or a prompt is refused
after the adapter was looked up, and twice for some that fail. An adapter that counts as used is never unloaded, and
one that counts as unused is unloaded under its requests. So this is a book of requests: in it from before the adapter
is looked up until the scheduler has said its last word on the request, or has never heard of it.
"""

from __future__ import annotations


async def note_use(original, manager, obj) -> None:
    """A request comes in."""
    if obj.lora_path:
        rids, adapters = (each if isinstance(each, list) else [each] for each in (obj.rid, obj.lora_path))
        if any(adapters):
            if getattr(obj, "parallel_sample_num", 1) > 1:  # its sequences get ids of their own only later
                raise ValueError("n above 1 cannot be used with an adapter; send a request for each sequence")
            _book(manager).update((rid, adapter) for rid, adapter in zip(rids, adapters, strict=True) if adapter)
    await original(manager, obj)


async def forget_finished(original, manager, output):
    """The scheduler has finished requests, also such as nobody waits for any more."""
    result = await original(manager, output)
    for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
        if reason is not None:
            _book(manager).pop(rid, None)
    return result


def forget_aborted(original, manager, echo):
    """The scheduler has thrown out a request that had not begun."""
    _book(manager).pop(echo.rid, None)
    return original(manager, echo)


def forget_undispatched(original, manager, obj, *args, **kwargs):
    """A request fails before the scheduler has heard of it. Of others we wait for its word."""
    for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        state = manager.rid_to_state.get(rid)
        if state is None or not state.dispatched:
            _book(manager).pop(rid, None)
    return original(manager, obj, *args, **kwargs)


async def count_nothing(original, registry, lora_id) -> None:
    """SGLang's count is not used, and its counter may be gone already."""


async def unload_only_what_is_idle(original, manager, obj):
    """Refuse at once where SGLang would wait for requests to end, while nothing else can be loaded.

    Nothing is awaited between the look into the book and the adapter's removal from where requests look it up. And
    where it was is forgotten: a request that comes too late must not load it again by itself.
    """
    if num_requests := sum(adapter == obj.lora_name for adapter in _book(manager).values()):
        raise ValueError(f"adapter {obj.lora_name} is in use by {num_requests} requests")
    registry = manager.lora_registry
    if registry._registry.pop(obj.lora_name, None) is None:
        raise ValueError(f"adapter {obj.lora_name} does not exist")
    obj.lora_id = obj.lora_name  # a revision's id is its name
    registry._counters.pop(obj.lora_id, None)
    manager.lora_ref_cache.pop(obj.lora_name, None)
    [result] = await manager.update_lora_adapter_communicator(obj)
    return result


def _book(manager) -> dict[str, str]:
    """Request id -> adapter."""
    return manager.__dict__.setdefault("prelude_uses", {})
