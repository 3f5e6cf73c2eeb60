"""Loads and unloads are sent without waiting, and each gets its own reply."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from engine.hooks.updates import update_side_by_side


async def test_updates_wait_for_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", SimpleNamespace(LoRAUpdateOutput=str))
    monkeypatch.setitem(sys.modules, "sglang.utils", SimpleNamespace(TypeBasedDispatcher=list))
    sent: list[int] = []
    manager = SimpleNamespace(_dispatch_to_scheduler=sent.append, _result_dispatcher=[])
    manager.lora_update_lock = asyncio.Lock()
    update_side_by_side(lambda manager: manager._result_dispatcher.append((str, "SGLang's")), manager)

    async def update(number: int) -> list[str]:
        async with manager.lora_update_lock:
            assert manager.lora_update_lock.locked()
            return await manager.update_lora_adapter_communicator(number)

    waiting = [asyncio.create_task(update(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert sent == [0, 1, 2, 3]  # before any reply
    waiting[1].cancel()
    await asyncio.sleep(0)
    (kind, handle_recv), _ = manager._result_dispatcher  # the first of a type wins
    assert kind is str
    for number in range(4):
        handle_recv(f"reply {number}")
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers.pop(1), asyncio.CancelledError)
    assert answers == [["reply 0"], ["reply 2"], ["reply 3"]]
