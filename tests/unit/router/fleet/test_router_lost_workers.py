"""When workers of a request count as stalled, and the breaker of one worker, by clocks that the tests move."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from support.routers.virtual_time import VIRTUAL

from router.errors import WorkerStalled
from router.fleet.lost_workers import Breaker, Observed, ProgressCheck

LOOP = VIRTUAL
TIMEOUT_S = 8.0


@dataclass
class Scene:
    """One worker, and what one check of it has found."""

    progressed_at: float = 0.0
    has_contact: bool = True
    stalls: list[WorkerStalled] = field(default_factory=list)

    def begin(self) -> None:
        """Begin the check. `progressed_at` is a time of the event loop's."""
        clock = asyncio.get_running_loop().time
        ProgressCheck(lambda: (Observed("d0", self, self.has_contact),), clock, TIMEOUT_S, self.stalls.append)  # type: ignore[arg-type]


async def test_a_worker_without_progress_has_stalled_once():
    (scene := Scene()).begin()
    await asyncio.sleep(7.9)
    assert not scene.stalls
    await asyncio.sleep(100)
    assert [str(each) for each in scene.stalls] == ["d0 made no progress for 8 s"]


async def test_without_contact_no_time_counts():
    (scene := Scene(has_contact=False)).begin()
    await asyncio.sleep(100)
    scene.has_contact = True
    await asyncio.sleep(6)
    assert not scene.stalls
    await asyncio.sleep(5)
    assert scene.stalls


async def test_a_check_after_a_standstill_of_this_process_does_not_count():
    """The workers' reports of that time wait in sockets."""
    (scene := Scene()).begin()
    loop: Any = asyncio.get_running_loop()
    loop.stand_still(20.0)
    await asyncio.sleep(1.0)
    assert not scene.stalls
    scene.progressed_at = loop.time()  # has been read
    await asyncio.sleep(7.0)
    assert not scene.stalls
    await asyncio.sleep(4.0)
    assert scene.stalls


# ---- the breaker ----------------------------------------------------------------------------------------------------


def breaker_and_changes() -> tuple[Breaker, list[bool]]:
    """And whether it was blocking, after each change."""
    seen: list[bool] = []
    breaker = Breaker("w", lambda: seen.append(breaker.is_blocking))
    return breaker, seen


def fail(breaker: Breaker, times: int = 3) -> None:
    for _ in range(times):
        breaker.failed()


async def test_failures_in_a_row_open_it_for_a_rest():
    breaker, seen = breaker_and_changes()
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert not breaker.is_blocking
    breaker.failed()
    assert breaker.is_blocking
    fail(breaker, 9)  # calls that had begun before
    await asyncio.sleep(0.99)
    assert breaker.is_blocking
    await asyncio.sleep(0.02)
    assert seen == [True, False]


async def test_one_probe_decides():
    breaker, _ = breaker_and_changes()
    fail(breaker)
    await asyncio.sleep(1.01)
    breaker.placed()
    assert breaker.is_blocking  # for all others
    breaker.succeeded()
    assert not breaker.is_blocking
    fail(breaker, 2)
    assert not breaker.is_blocking  # it counts from zero


async def test_each_failed_probe_doubles_the_rest():
    breaker, _ = breaker_and_changes()
    fail(breaker)
    rests = []
    for _ in range(5):
        began_at = asyncio.get_running_loop().time()
        while breaker.is_blocking:  # noqa: ASYNC110 under a virtual clock
            await asyncio.sleep(0.01)
        rests.append(round(asyncio.get_running_loop().time() - began_at))
        breaker.placed()
        breaker.failed()
    assert rests == [1, 2, 4, 8, 8]


async def test_a_probe_whose_client_leaves_is_followed_by_another_one():
    breaker, _ = breaker_and_changes()
    fail(breaker)
    await asyncio.sleep(1.01)
    breaker.placed()
    await asyncio.sleep(2.01)
    assert not breaker.is_blocking
    breaker.placed()
    assert breaker.is_blocking


async def test_another_engine_starts_closed():
    breaker, seen = breaker_and_changes()
    fail(breaker)
    breaker.reset()
    assert not breaker.is_blocking
    await asyncio.sleep(5)
    assert seen == [True, False]


async def test_transfers_that_fail_at_once_count_once():
    breaker, _ = breaker_and_changes()
    for _ in range(2):
        for _ in range(32):  # all that were under way to a peer that ends
            breaker.transfer_failed()
        await asyncio.sleep(0.6)
    assert not breaker.is_blocking
    breaker.transfer_failed()
    assert breaker.is_blocking
