"""Blocking work in threads, and what becomes of it when nobody wants it any more."""

from __future__ import annotations

import asyncio
import time

import pytest

from prefill_worker.residency.threads import Stop, Stopped, WorkThreads


def test_cancelled_work_has_ended_before_the_cancellation_is_seen():
    async def scenario() -> None:
        threads = WorkThreads(1)
        ended: list[str] = []

        def work(stop: Stop) -> None:
            try:
                while True:
                    time.sleep(0.05)
                    stop.check()
            except Stopped:
                time.sleep(0.1)
                ended.append("stopped")
                raise

        task = asyncio.create_task(threads.run(work))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # whoever is impatient waits as well
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["stopped"]
        threads.close()

    asyncio.run(scenario())


def test_what_must_be_done_is_done():
    async def scenario() -> None:
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
        threads.close()

    asyncio.run(scenario())


def test_results_and_errors_come_back():
    async def scenario() -> None:
        threads = WorkThreads(2)
        assert await threads.run(lambda _: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda _: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await threads.run_to_end(lambda: 1 // 0)
        threads.close()

    asyncio.run(scenario())
