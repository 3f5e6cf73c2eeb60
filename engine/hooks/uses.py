"""Bodies of the hooks by which an adapter is unloaded only while nothing needs it.

SGLang counts an adapter's requests from the end of its lookup until their answers end. Here a request needs its adapter
from when the server takes it until its prompt is read, again while it is retracted, and a load until its reply. The
server knows which requests are on their way to the scheduler, the scheduler knows the others.
"""

from collections import Counter

from engine.hooks.packed import unload
from engine.hooks.positions import num_needing

NOT_RESIDENT_STATUS = 424  # of the answer for an adapter that the engine lacks; the router knows it


async def note_lookup(original, manager, obj) -> None:
    """Look up a new request's adapters. A missing one has a status of its own."""
    if any(_listed(obj.lora_path)) and getattr(obj, "parallel_sample_num", 1) > 1:
        raise ValueError("n above 1 cannot be used with an adapter; send a request for each sequence")
    try:
        await original(manager, obj)
    except ValueError as error:  # a status of its own, since a client may choose what texts of errors quote
        obj.lora_path = None  # SGLang would give back what it has not taken
        from fastapi import HTTPException

        raise HTTPException(NOT_RESIDENT_STATUS, str(error)) from error


async def note_load(original, manager, obj, *args):
    """Record a load until its reply has registered the adapter, or it fails.

    Loads are sent without waiting, so the reply of a second one of the same adapter can come after an unload. It would
    register the adapter again, and a request for it would end the scheduler, which has it no more.
    """
    if manager.disaggregation_mode.value == "decode":
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

        return LoadLoRAAdapterReqOutput(success=False, error_message="a decode engine holds no adapters")
    loads, name = _loads(manager), obj.lora_name
    loads[name] += 1
    try:
        return await original(manager, obj, *args)
    finally:
        loads[name] -= 1
        if not loads[name]:
            del loads[name]


async def unload_only_what_is_idle(original, manager, obj):
    """Unload an idle adapter; refuse one in use, where SGLang would wait and block every other load.

    One that is being loaded is in use, too: its unload can be sent once the load has ended.

    There is no await between the check and the adapter's removal from the registry, so no request can come between.
    SGLang's cache of adapter paths is cleared, too: a late request must not reload the adapter on its own. If the
    scheduler refuses, both get it back.
    """
    name, registry = obj.lora_name, manager.lora_registry
    requests = [state for state in manager.rid_to_state.values() if name in _listed(state.obj.lora_path)]
    if num_requests := sum(not state.dispatched for state in requests):
        raise ValueError(_in_use(name, num_requests))
    if name in _loads(manager):
        raise ValueError(f"adapter {name} is in use by a load that has not ended")
    is_partly_loaded = manager.pending_lora_unloads.pop(name, None) is not None
    lora_ref = registry._registry.pop(name, None)
    if lora_ref is None and not is_partly_loaded:
        raise ValueError(f"adapter {name} does not exist")
    obj.lora_id = name  # a revision's id is its name
    manager.lora_ref_cache.pop(name, None)
    [result] = await manager.update_lora_adapter_communicator(obj)
    if result.success:
        registry._counters.pop(name, None)
        for state in requests:  # they go on; SGLang would count down what is no longer there
            state.lora_released = True
    elif lora_ref is not None:
        registry._registry[name] = manager.lora_ref_cache[name] = lora_ref
    return result


def unload_unless_needed(original, scheduler, obj):
    """Unload an adapter, or refuse while a request in the scheduler needs it. All ranks have the same requests."""
    manager, lora_ref = scheduler.tp_worker.model_runner.lora_manager, obj.to_ref()
    if num_requests := num_needing(scheduler, lora_ref.lora_id):
        return manager.create_lora_update_result(False, _in_use(lora_ref.lora_id, num_requests))
    return unload(manager, lora_ref)


def _in_use(name: str, num_requests: int) -> str:
    return f"adapter {name} is in use by {num_requests} requests"


def _listed(names) -> list[str | None]:
    return names if isinstance(names, list) else [names]


def _loads(manager) -> Counter[str]:
    """Loads that have not ended, by adapter."""
    return manager.__dict__.setdefault("prelude_loads", Counter())
