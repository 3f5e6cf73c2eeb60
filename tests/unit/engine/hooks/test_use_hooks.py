"""What keeps an adapter from being unloaded, with the calls that SGLang's server makes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from engine.hooks import uses

NAME = "sha256:a"


class Manager:
    """The parts of SGLang's TokenizerManager that the hooks use."""

    def __init__(self) -> None:
        counter = SimpleNamespace(value=lambda: 0)  # requests that SGLang counts
        self.lora_registry = SimpleNamespace(_registry={NAME: "its record"}, _counters={NAME: counter})
        self.lora_ref_cache = {NAME: "where it was"}
        self.pending_lora_unloads: dict[str, str] = {}

    def look_up(self, adapter) -> str:
        """Why an unload is refused meanwhile."""
        seen = []

        async def resolve(_manager, _obj):
            seen.append(refusal(self))

        asyncio.run(uses.note_lookup(resolve, self, SimpleNamespace(lora_path=adapter)))
        return seen[0]

    async def unload_now(self) -> str:
        async def tell_the_scheduler(obj):
            assert obj.lora_id == NAME
            assert NAME not in self.lora_registry._registry  # nobody finds it any more
            return ["unloaded"]

        self.update_lora_adapter_communicator = tell_the_scheduler
        return await uses.unload_only_what_is_idle(None, self, SimpleNamespace(lora_name=NAME))

    def unload(self) -> str:
        return asyncio.run(self.unload_now())


def refusal(manager: Manager) -> str:
    """Why an unload is refused, from inside another call on the event loop."""
    try:
        manager.unload_now().send(None)
    except ValueError as error:
        return str(error)
    except StopIteration:
        return ""
    return ""


@pytest.mark.parametrize("adapter", [NAME, [NAME, None]])
def test_one_that_is_being_looked_up_is_in_use(adapter):
    """SGLang counts it only when that has ended."""
    manager = Manager()
    assert manager.look_up(adapter) == f"adapter {NAME} is in use by 1 requests"
    assert manager.unload() == "unloaded"
    assert manager.lora_ref_cache == {}  # else a late request would load it again


def test_one_that_is_missing_has_a_status_of_its_own_and_is_not_given_back():
    async def fail(*_):
        raise ValueError("Got LoRA adapter that has never been loaded: sha256:a")

    asked = SimpleNamespace(lora_path=NAME)
    with pytest.raises(HTTPException) as missing:
        asyncio.run(uses.note_lookup(fail, Manager(), asked))
    assert (missing.value.status_code, asked.lora_path) == (uses.NOT_RESIDENT_STATUS, None)


def test_requests_for_the_base_model_use_nothing():
    assert Manager().look_up(None) == ""


def test_one_that_only_some_ranks_have_can_be_unloaded():
    """SGLang takes no load of it before."""
    manager = Manager()
    manager.lora_registry._registry.clear()
    manager.pending_lora_unloads[NAME] = NAME
    assert manager.unload() == "unloaded"
    assert manager.pending_lora_unloads == {}
