"""Bodies of the hooks by which an adapter is unloaded only while nothing uses it.

SGLang counts an adapter's requests from the end of its lookup until the scheduler has finished them. Here the lookup
itself counts, too, and a load until its reply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

NOT_RESIDENT_STATUS = 424  # of the answer for an adapter that the engine lacks; the router knows it


async def note_lookup(original, manager, obj) -> None:
    """Look up a new request's adapters, which nobody may unload meanwhile."""
    adapters = {adapter for adapter in _listed(obj.lora_path) if adapter}
    if adapters and getattr(obj, "parallel_sample_num", 1) > 1:
        raise ValueError("n above 1 cannot be used with an adapter; send a request for each sequence")
    try:
        with _noted(_lookups(manager), adapters):
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
    with _noted(_loads(manager), {obj.lora_name}):
        return await original(manager, obj, *args)


async def unload_only_what_is_idle(original, manager, obj):
    """Unload an idle adapter; refuse one in use, where SGLang would wait and block every other load.

    One that is being loaded is in use, too: its unload can be sent once the load has ended.

    There is no await between the check and the adapter's removal from the registry, so no request can come between.
    SGLang's cache of adapter paths is cleared, too: a late request must not reload the adapter on its own.
    """
    name, registry = obj.lora_name, manager.lora_registry
    counter = registry._counters.get(name)  # a revision's id is its name
    if num_requests := _lookups(manager)[name] + (0 if counter is None else counter.value()):
        raise ValueError(f"adapter {name} is in use by {num_requests} requests")
    if name in _loads(manager):
        raise ValueError(f"adapter {name} is in use by a load that has not ended")
    is_partly_loaded = manager.pending_lora_unloads.pop(name, None) is not None
    if registry._registry.pop(name, None) is None and not is_partly_loaded:
        raise ValueError(f"adapter {name} does not exist")
    obj.lora_id = name
    registry._counters.pop(name, None)
    manager.lora_ref_cache.pop(name, None)
    [result] = await manager.update_lora_adapter_communicator(obj)
    return result


def _listed(names) -> list[str | None]:
    return names if isinstance(names, list) else [names]


@contextmanager
def _noted(counts: Counter[str], names: set[str]) -> Iterator[None]:
    counts.update(names)
    try:
        yield
    finally:
        for name in names:
            counts[name] -= 1
            if not counts[name]:
                del counts[name]


def _lookups(manager) -> Counter[str]:
    """Requests whose adapter is being looked up, by adapter."""
    return manager.__dict__.setdefault("prelude_lookups", Counter())


def _loads(manager) -> Counter[str]:
    """Loads that have not ended, by adapter."""
    return manager.__dict__.setdefault("prelude_loads", Counter())
