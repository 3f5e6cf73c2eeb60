"""Loads and unloads are sent without waiting, and each gets its own reply."""

from __future__ import annotations

import asyncio

from engine.hooks.updates import Pipeline


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
