"""Open and closed loops in virtual time: nothing here depends on the machine."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from support.routers.virtual_time import run_in_virtual_time

from bench.load.loops import Loop
from bench.load.record import NOT_SENT, UNREACHABLE, Record
from bench.load.summary import summary
from bench.workloads.session import COMPLETIONS, Request, Session

ONE = Request(COMPLETIONS, {"prompt": [1]}, 1)


def sessions(count: int, *requests: Request) -> list[Session]:
    return [Session(number, None, requests or (ONE,)) for number in range(count)]


class Server:
    """Answers by virtual time; stands still from `stalls_at` to `wakes_at`."""

    def __init__(self, service_s: float, stalls_at: float = -1.0, wakes_at: float = -1.0) -> None:
        self.service_s, self.stalls_at, self.wakes_at = service_s, stalls_at, wakes_at
        self.now: Callable[[], float] = lambda: 0.0
        self.in_flight = self.most_in_flight = 0
        self.fails: set[tuple[int, int]] = set()

    async def send(self, request: Request, adapter: int | None, intended_s: float, session: int, turn: int) -> Record:
        sent_s = self.now()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.service_s)
        if self.stalls_at <= self.now() < self.wakes_at:
            await asyncio.sleep(self.wakes_at - self.now())
        self.in_flight -= 1
        error = UNREACHABLE if (session, turn) in self.fails else None
        end_s = self.now()
        return Record(
            session, turn, intended_s, sent_s, end_s, token_s=(end_s,), output_tokens=1, max_tokens=1, error=error
        )


def run(server: Server, drive: Callable[[Loop], Awaitable[None]], duration_s: float | None = None) -> list[Record]:
    async def main() -> list[Record]:
        server.now = asyncio.get_running_loop().time
        loop = Loop(server.send, server.now, duration_s, spin_s=0.0)
        await drive(loop)
        assert loop.num_in_flight == 0
        return sorted(loop.records, key=lambda each: (each.session, each.turn))

    return run_in_virtual_time(main())


def constant(count: int, gap_s: float, *requests: Request) -> list[tuple[Session, float]]:
    return [(session, session.number * gap_s) for session in sessions(count, *requests)]


def test_a_stall_is_in_the_latency_of_all_who_should_have_been_served():
    """Coordinated omission: a server that stands still for 10 s, asked ten times a second, makes a hundred wait.

    A generator that waits for answers before it sends would see one slow request.
    """
    server = Server(0.001, stalls_at=10.0, wakes_at=20.0)
    records = run(server, lambda loop: loop.open(constant(300, 0.1)))
    assert [record.intended_s for record in records] == pytest.approx([n * 0.1 for n in range(300)])
    slow = [record.e2e_s for record in records if record.e2e_s > 0.01]
    assert slow == pytest.approx([10.0 - n * 0.1 for n in range(100)], abs=0.011)
    found = summary(records, {"ttft": 1000.0})
    assert found["ttft_ms"]["p90"] == pytest.approx(7000, abs=110)
    assert found["goodput"]["share"] == pytest.approx(210 / 300, abs=0.005)
    assert server.most_in_flight == 100


def test_an_open_loop_that_is_behind_sends_meanwhile_and_hears_of_a_stop():
    """All are due at once, so there is nothing to wait for between two of them."""
    server, made = Server(0.0), 0

    async def drive(loop: Loop) -> None:
        def due() -> Iterator[tuple[Session, float]]:
            nonlocal made
            for session in sessions(1000):
                made += 1
                if made == 500:
                    assert len(loop.records) > 400
                    asyncio.get_running_loop().call_soon(loop.stop)
                yield session, 0.0

        await loop.open(due())

    records = run(server, drive)
    assert 500 <= len(records) == made - 1 < 510


def test_the_closed_loop_keeps_as_many_in_flight():
    server = Server(0.5)
    records = run(server, lambda loop: loop.closed(iter(sessions(10)), 4))
    assert server.most_in_flight == 4
    assert [record.session for record in records] == list(range(10))
    assert records[-1].end_s == 1.5
    assert all(record.intended_s == record.sent_s for record in records)


def test_the_end_of_the_time_sends_nothing_more_and_waits_for_what_was_sent():
    records = run(Server(0.7), lambda loop: loop.closed(iter(sessions(1000)), 2), duration_s=2.0)
    assert [record.sent_s for record in records] == pytest.approx([0, 0, 0.7, 0.7, 1.4, 1.4])
    records = run(Server(5.0), lambda loop: loop.open(constant(1000, 0.5)), duration_s=2.0)
    assert [record.sent_s for record in records] == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_stop_sends_nothing_more_and_waits_for_what_was_sent(is_open: bool):
    async def drive(loop: Loop) -> None:
        asyncio.get_running_loop().call_later(1.25, loop.stop)
        await (loop.open(constant(1000, 0.5)) if is_open else loop.closed(iter(sessions(1000)), 1))
        assert loop.is_stopped

    records = run(Server(0.5), drive)
    assert [record.sent_s for record in records] == [0.0, 0.5, 1.0]
    assert records[-1].end_s == 1.5


TURNS = (ONE, Request(COMPLETIONS, {"prompt": [1]}, 1, pause_s=2.0), ONE)


def test_a_turn_waits_for_the_one_before_and_for_its_user():
    records = run(Server(0.25), lambda loop: loop.open(constant(1, 1.0, *TURNS)))
    assert [(record.turn, record.intended_s) for record in records] == [(0, 0.0), (1, 2.25), (2, 2.5)]
    assert all(record.e2e_s == 0.25 for record in records)


def test_turns_after_a_failure_are_counted_as_not_sent():
    server = Server(0.25)
    server.fails = {(0, 1)}
    records = run(server, lambda loop: loop.closed(iter(sessions(2, *TURNS)), 1))
    assert [(record.session, record.turn, record.error) for record in records] == [
        (0, 0, None),
        (0, 1, UNREACHABLE),
        (0, 2, NOT_SENT),
        *((1, turn, None) for turn in range(3)),
    ]
    assert summary(records, {})["errors"]["by_kind"] == {UNREACHABLE: 1, NOT_SENT: 1}
