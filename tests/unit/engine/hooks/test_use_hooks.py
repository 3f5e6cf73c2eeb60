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

    def __init__(self, num_requests: int = 0) -> None:
        self.num_requests = num_requests  # that SGLang counts
        counter = SimpleNamespace(value=lambda: self.num_requests)
        self.lora_registry = SimpleNamespace(_registry={NAME: "its record"}, _counters={NAME: counter})
        self.lora_ref_cache = {NAME: "where it was"}
        self.pending_lora_unloads: dict[str, str] = {}

    def look_up(self, adapter, during=lambda: None, *, error: Exception | None = None, **fields) -> SimpleNamespace:
        async def resolve(_manager, _obj):
            during()
            if error is not None:
                raise error

        obj = SimpleNamespace(lora_path=adapter, **fields)
        asyncio.run(uses.note_lookup(resolve, self, obj))
        return obj

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


def test_an_adapter_is_unloaded_once_sglang_counts_no_request():
    manager = Manager(num_requests=2)
    with pytest.raises(ValueError, match="in use by 2 requests"):
        manager.unload()
    assert NAME in manager.lora_ref_cache
    manager.num_requests = 0
    assert manager.unload() == "unloaded"
    assert manager.lora_registry._counters == {}
    assert manager.lora_ref_cache == {}
    with pytest.raises(ValueError, match="does not exist"):
        manager.unload()


@pytest.mark.parametrize("adapter", [NAME, [NAME, None]])
def test_one_that_is_being_looked_up_is_in_use(adapter):
    """SGLang counts it only when that has ended."""
    manager, seen = Manager(), []
    manager.look_up(adapter, lambda: seen.append(refusal(manager)))
    assert seen == [f"adapter {NAME} is in use by 1 requests"]
    assert manager.unload() == "unloaded"


def test_requests_for_the_base_model_use_nothing():
    manager, seen = Manager(), []
    manager.look_up(None, lambda: seen.append(refusal(manager)))
    assert seen == [""]


def test_a_missing_adapter_has_a_status_of_its_own_and_is_not_given_back():
    manager = Manager()
    with pytest.raises(HTTPException) as missing:
        manager.look_up(NAME, error=ValueError("Got LoRA adapter that has never been loaded: sha256:a"))
    assert missing.value.status_code == uses.NOT_RESIDENT_STATUS
    assert manager.unload() == "unloaded"


@pytest.mark.parametrize("adapters", [[NAME] * 2, [None] * 2])
def test_several_answers_to_one_prompt_are_refused_with_an_adapter(adapters):
    manager, looked_up = Manager(), []
    if adapters[0]:
        with pytest.raises(ValueError, match="n above 1 cannot be used with an adapter"):
            manager.look_up(adapters, lambda: looked_up.append(1), parallel_sample_num=2)
    else:
        manager.look_up(adapters, lambda: looked_up.append(1), parallel_sample_num=2)
    assert len(looked_up) == (adapters[0] is None)
    assert manager.unload() == "unloaded"


def test_one_that_only_some_ranks_have_can_be_unloaded():
    """SGLang takes no load of it before."""
    manager = Manager()
    manager.lora_registry._registry.clear()
    manager.pending_lora_unloads[NAME] = NAME
    assert manager.unload() == "unloaded"
    assert manager.pending_lora_unloads == {}
