"""Blocking work in threads, and its cancellation."""

import asyncio
import time

import pytest

from prefill_worker.residency.threads import Stop, Stopped, WorkThreads


async def test_cancelled_work_has_ended_before_the_cancellation_is_seen():
    threads = WorkThreads(1)
    ended: list[str] = []
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(stop: Stop) -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                time.sleep(0.05)
                stop.check()
        except Stopped:
            time.sleep(0.1)
            ended.append("stopped")
            raise

    task = asyncio.create_task(threads.run(work))
    await begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # a second cancellation waits as well
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["stopped"]
    await threads.aclose()


async def test_run_to_end_outlasts_cancellation():
    threads = WorkThreads(1)
    done: list[str] = []

    def work() -> None:
        time.sleep(0.2)
        done.append("done")

    task = asyncio.create_task(threads.run_to_end(work))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["done"]
    await threads.aclose()
