"""Loads and unloads are sent without waiting, and each gets its own reply."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from engine.hooks.updates import NoLock, Pipeline


async def test_each_gets_its_own_reply():
    sent: list[int] = []
    pipeline = Pipeline(sent.append)
    pipeline.set_fan_out(1)
    waiting = [asyncio.create_task(pipeline(number)) for number in range(5)]
    await asyncio.sleep(0)
    assert sent == [0, 1, 2, 3, 4]  # before any reply
    waiting[2].cancel()
    await asyncio.sleep(0)
    for number in range(5):
        pipeline.handle_recv(f"reply {number}")
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers.pop(2), asyncio.CancelledError)
    assert answers == [["reply 0"], ["reply 1"], ["reply 3"], ["reply 4"]]
    late = asyncio.create_task(pipeline(5))
    await asyncio.sleep(0)
    pipeline.handle_recv("reply 5")
    assert await late == ["reply 5"]


async def test_updates_wait_for_nobody():
    lock, inside = NoLock(), SimpleNamespace(now=0, most=0)

    async def update() -> None:
        async with lock:
            inside.now += 1
            inside.most = max(inside.most, inside.now)
            assert lock.locked()
            await asyncio.sleep(0)
            inside.now -= 1

    await asyncio.gather(update(), update(), update())
    assert inside.most == 3
