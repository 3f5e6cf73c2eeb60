"""Bodies of the hooks that track which adapters the engine's requests use.

SGLang's own count leaks: it is not decremented when a client disconnects or a prompt is refused after the adapter was
looked up, and it is decremented twice for some failed requests. With too high a count an adapter is never unloaded,
with too low a count it is unloaded under its requests. So the server records each request here: from before its
adapter is looked up until the scheduler has finished it, or until it fails before the scheduler receives it.
"""

from __future__ import annotations

from collections import Counter

NOT_RESIDENT_STATUS = 424  # of the answer for an adapter that the engine lacks; the router knows it


async def note_use(original, manager, obj) -> None:
    """Record a new request's adapters, then look them up."""
    if obj.lora_path:
        rids, adapters = (field if isinstance(field, list) else [field] for field in (obj.rid, obj.lora_path))
        if any(adapters):
            if getattr(obj, "parallel_sample_num", 1) > 1:  # its sequences get their own ids only later
                raise ValueError("n above 1 cannot be used with an adapter; send a request for each sequence")
            _uses(manager).update((rid, adapter) for rid, adapter in zip(rids, adapters, strict=True) if adapter)
    try:
        await original(manager, obj)
    except ValueError as error:  # a status of its own, since a client may choose what texts of errors quote
        from fastapi import HTTPException

        raise HTTPException(NOT_RESIDENT_STATUS, str(error)) from error


async def forget_finished(original, manager, output):
    """Remove the requests that the scheduler reports finished, also those whose client has left."""
    result = await original(manager, output)
    for rid, reason in zip(output.rids, output.finished_reasons, strict=True):
        if reason is not None:
            _uses(manager).pop(rid, None)
    return result


def forget_aborted(original, manager, echo):
    """Remove a request that the scheduler aborted before it started."""
    _uses(manager).pop(echo.rid, None)
    return original(manager, echo)


def forget_undispatched(original, manager, obj, *args, **kwargs):
    """Remove a request that failed before dispatch. A dispatched one stays until the scheduler reports it."""
    for rid in obj.rid if isinstance(obj.rid, list) else [obj.rid]:
        state = manager.rid_to_state.get(rid)
        if state is None or not state.dispatched:
            _uses(manager).pop(rid, None)
    return original(manager, obj, *args, **kwargs)


async def note_load(original, manager, obj, *args):
    """Record a load until its reply has registered the adapter, or it fails.

    Loads are sent without waiting, so the reply of a second one of the same adapter can come after an unload. It would
    register the adapter again, and a request for it would end the scheduler, which has it no more.
    """
    loads = _loads(manager)
    loads[obj.lora_name] += 1
    try:
        return await original(manager, obj, *args)
    finally:
        loads[obj.lora_name] -= 1
        if not loads[obj.lora_name]:
            del loads[obj.lora_name]


async def count_nothing(original, registry, lora_id) -> None:
    """Do nothing: SGLang's count is unused, and its counter may have been removed."""


async def unload_only_what_is_idle(original, manager, obj):
    """Unload an idle adapter; refuse one in use, where SGLang would wait and block every other load.

    One that is being loaded is in use, too: its unload can be sent once the load has ended.

    There is no await between the check and the adapter's removal from the registry, so no request can come between.
    SGLang's cache of adapter paths is cleared, too: a late request must not reload the adapter on its own.
    """
    if num_requests := sum(adapter == obj.lora_name for adapter in _uses(manager).values()):
        raise ValueError(f"adapter {obj.lora_name} is in use by {num_requests} requests")
    if obj.lora_name in _loads(manager):
        raise ValueError(f"adapter {obj.lora_name} is in use by a load that has not ended")
    registry = manager.lora_registry
    if registry._registry.pop(obj.lora_name, None) is None:
        raise ValueError(f"adapter {obj.lora_name} does not exist")
    obj.lora_id = obj.lora_name  # a revision's id is its name
    registry._counters.pop(obj.lora_id, None)
    manager.lora_ref_cache.pop(obj.lora_name, None)
    [result] = await manager.update_lora_adapter_communicator(obj)
    return result


def _uses(manager) -> dict[str, str]:
    """Adapter in use, by request id."""
    return manager.__dict__.setdefault("prelude_uses", {})


def _loads(manager) -> Counter[str]:
    """Loads that have not ended, by adapter."""
    return manager.__dict__.setdefault("prelude_loads", Counter())
