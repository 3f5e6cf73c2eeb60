"""Tracking which requests use which adapters, with the calls that SGLang's server makes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from engine.hooks import uses


class Manager:
    """The parts of SGLang's TokenizerManager that the hooks use."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, SimpleNamespace] = {}
        self.lora_registry = SimpleNamespace(_registry={"sha256:a": "its record"}, _counters={"sha256:a": 3})
        self.lora_ref_cache = {"sha256:a": "where it was"}

    def come(self, rid, adapter, dispatched: bool = True) -> SimpleNamespace:
        async def resolve(_manager, _obj):
            assert "sha256:a" in uses._uses(self).values()  # noted before it is looked up

        obj = SimpleNamespace(rid=rid, lora_path=adapter)
        for each in rid if isinstance(rid, list) else [rid]:
            self.rid_to_state[each] = SimpleNamespace(dispatched=dispatched)
        asyncio.run(uses.note_use(resolve, self, obj))
        return obj

    def unload(self) -> str:
        async def tell_the_scheduler(obj):
            assert obj.lora_id == "sha256:a"
            assert "sha256:a" not in self.lora_registry._registry  # nobody finds it any more
            return ["unloaded"]

        self.update_lora_adapter_communicator = tell_the_scheduler
        return asyncio.run(uses.unload_only_what_is_idle(None, self, SimpleNamespace(lora_name="sha256:a")))

    def says(self, **reasons) -> None:
        """The scheduler's output for requests; a reason of None: not finished."""

        async def handled(_manager, _output):
            for rid in reasons:
                self.rid_to_state.pop(rid, None)

        output = SimpleNamespace(rids=list(reasons), finished_reasons=list(reasons.values()))
        asyncio.run(uses.forget_finished(handled, self, output))


def test_an_adapter_is_used_until_the_scheduler_has_finished():
    manager = Manager()
    manager.come("r1", "sha256:a")
    manager.come("r2", "sha256:a")
    manager.says(r1=None, r2={"type": "stop"})
    with pytest.raises(ValueError, match="in use by 1 requests"):
        manager.unload()
    assert "sha256:a" in manager.lora_ref_cache
    manager.says(r1={"type": "length"})
    assert manager.unload() == "unloaded"
    assert manager.lora_registry._counters == {}
    assert manager.lora_ref_cache == {}
    with pytest.raises(ValueError, match="does not exist"):
        manager.unload()


def test_a_missing_adapter_has_a_status_of_its_own():
    async def is_missing(_manager, _obj):
        raise ValueError("Got LoRA adapter that has never been loaded: sha256:b")

    with pytest.raises(HTTPException) as missing:
        asyncio.run(uses.note_use(is_missing, Manager(), SimpleNamespace(rid="r1", lora_path="sha256:b")))
    assert missing.value.status_code == uses.NOT_RESIDENT_STATUS


def test_a_client_that_leaves_uses_it_until_the_scheduler_has_stopped():
    manager = Manager()
    obj = manager.come("r1", "sha256:a")
    uses.forget_undispatched(lambda *_: manager.rid_to_state.clear(), manager, obj)
    with pytest.raises(ValueError, match="in use"):
        manager.unload()
    manager.says(r1={"type": "abort"})
    assert manager.unload() == "unloaded"


@pytest.mark.parametrize("rid", ["r1", ["r1", "r2"]])
def test_what_the_scheduler_never_heard_of_uses_nothing(rid):
    manager = Manager()
    obj = manager.come(rid, "sha256:a" if rid == "r1" else ["sha256:a", None], dispatched=False)
    uses.forget_undispatched(lambda *_: None, manager, obj)
    assert manager.unload() == "unloaded"


@pytest.mark.parametrize("adapters", [["sha256:a"] * 2, [None] * 2])
def test_several_answers_to_one_prompt_are_not_booked(adapters):
    """SGLang gives each its own id only after the adapter is looked up."""
    manager, looked_up = Manager(), []

    async def resolve(_manager, obj):
        looked_up.append(obj)

    obj = SimpleNamespace(rid=["r1"], lora_path=adapters, parallel_sample_num=2)
    if adapters[0]:
        with pytest.raises(ValueError, match="n above 1 cannot be used with an adapter"):
            asyncio.run(uses.note_use(resolve, manager, obj))
    else:
        asyncio.run(uses.note_use(resolve, manager, obj))
    assert len(looked_up) == (adapters[0] is None)
    assert manager.unload() == "unloaded"


def test_what_is_thrown_out_of_the_queue_uses_nothing():
    manager = Manager()
    manager.come("r1", "sha256:a")
    uses.forget_aborted(lambda *_: None, manager, SimpleNamespace(rid="r1"))
    uses.forget_aborted(lambda *_: None, manager, SimpleNamespace(rid="health check"))
    assert manager.unload() == "unloaded"


def test_sglangs_own_release_does_nothing():
    async def release(*_):
        raise KeyError("its counter is gone")

    assert asyncio.run(uses.count_nothing(release, None, "sha256:a")) is None
