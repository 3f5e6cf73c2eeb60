"""Open and closed loops over sessions. Time and sending are the caller's, so tests run them in virtual time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator

from bench.load.record import NOT_SENT, Record
from bench.workloads.session import Request, Session

# Sends one request: request, adapter, intended time, session number, turn.
Send = Callable[[Request, int | None, float, int, int], Awaitable[Record]]

SPIN_S = 0.001
_MIN_GAP_TO_SPIN_S = 0.005  # between sessions: else spinning would cost too much of a core


class Loop:
    """Sends sessions and keeps the records."""

    def __init__(
        self,
        send: Send,
        now: Callable[[], float],
        duration_s: float | None = None,
        spin_s: float = SPIN_S,
    ) -> None:
        """`now` gives the seconds since the start; from `duration_s` on no request is sent.

        The last `spin_s` before a due time are spent on asking for the time, since timers are about as late as that.
        """
        self._send = send
        self._now = now
        self._spin_s = spin_s
        self._duration_s = float("inf") if duration_s is None else duration_s
        self._stopped = asyncio.Event()
        self.records: list[Record] = []
        self.num_in_flight = 0

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Send nothing more. What is in flight comes to its end."""
        self._stopped.set()

    async def open(self, due: Iterable[tuple[Session, float]]) -> None:
        """Start each session when it is due, whatever became of the ones before."""
        last_due_s = 0.0
        async with asyncio.TaskGroup() as group:
            for session, due_s in due:
                if due_s >= self._duration_s:
                    return
                await self._until(due_s, due_s - last_due_s >= _MIN_GAP_TO_SPIN_S)
                if self.is_stopped:
                    return
                last_due_s = due_s
                group.create_task(self._run(session, due_s), name=f"session {session.number}")
                await asyncio.sleep(0)  # a loop that is behind must send, read and hear of a stop, too

    async def closed(self, sessions: Iterator[Session], concurrency: int) -> None:
        """Keep `concurrency` sessions going; the end of one starts the next."""

        async def client() -> None:
            for session in sessions:  # shared: each client takes the next one
                if self._now() >= self._duration_s or self.is_stopped:
                    return
                await self._run(session, self._now())

        async with asyncio.TaskGroup() as group:
            for number in range(concurrency):
                group.create_task(client(), name=f"client {number}")

    async def _run(self, session: Session, due_s: float) -> None:
        for turn, request in enumerate(session.requests):
            if turn:
                due_s = self._now() + request.pause_s
                if due_s >= self._duration_s:
                    return
                await self._until(due_s, True)
                if self.is_stopped:
                    return
            self.num_in_flight += 1
            try:
                record = await self._send(request, session.adapter, due_s, session.number, turn)
            finally:
                self.num_in_flight -= 1
            self.records.append(record)
            if record.error is not None:
                self._skip(session, turn + 1, record)
                return

    def _skip(self, session: Session, turn: int, failed: Record) -> None:
        """The turns after a failed one are counted, too."""
        for number, request in enumerate(session.requests[turn:], turn):
            self.records.append(
                Record(
                    session=session.number,
                    turn=number,
                    adapter=failed.adapter,
                    intended_s=failed.end_s,
                    sent_s=failed.end_s,
                    end_s=failed.end_s,
                    max_tokens=request.max_tokens,
                    error=NOT_SENT,
                    detail=f"turn {turn - 1} failed",
                )
            )

    async def _until(self, due_s: float, precisely: bool) -> None:
        spin_s = self._spin_s if precisely else 0.0
        while (left_s := due_s - self._now()) > spin_s and not self.is_stopped:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s - spin_s):
                    await self._stopped.wait()
        while spin_s and self._now() < due_s and not self.is_stopped:  # noqa: ASYNC110
            await asyncio.sleep(0)
