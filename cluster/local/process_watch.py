"""Ends routers and agents of a local cluster that hang, so that the supervisor restarts them.

From a process's first answer on, the rules are those for an engine's HTTP server (`engine/hang_watch.py`). Until then
it starts, which may take long: it hangs only if it uses no processor time at all.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import psutil

from engine.hang_watch import OBSERVE_S, TICK_S, HangWatch, PartState, Processor, Timeouts, processor_of
from process.exhaustion import is_exhaustion
from process.lifetime import kill_group

_ASK_EVERY_S = 4.0
_ASK_EARLY_EVERY_S = 0.5  # until the first answer: clients may have had theirs before
_TIMEOUTS = Timeouts(hang_s=15.0, batch_s=0.0)  # ended after 30 s without processor time, after 60 s with it
_START_TIMEOUTS = Timeouts(hang_s=60.0, batch_s=0.0)  # until the first answer: after 120 s without processor time


@dataclass(slots=True)
class _Watched:
    pid: int
    watch: HangWatch = field(default_factory=lambda: HangWatch(_START_TIMEOUTS))
    num_answers: int = 0

    def answered(self) -> None:
        if not self.num_answers:
            self.watch = HangWatch(_TIMEOUTS)
        self.num_answers += 1

    def state(self) -> PartState:
        """Raises psutil.Error if it has just ended, and OSError without descriptors."""
        if self.num_answers:
            return PartState(self.num_answers, processor_of(self.pid))
        times = psutil.Process(self.pid).cpu_times()  # of all its threads: any may be what it waits for
        return PartState(int((times.user + times.system) / TICK_S), Processor(0))


class ProcessWatch:
    """Watches processes by their /health until cancelled."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Mapping[str, str],
        pid_of: Callable[[str], int | None],
        report: Callable[[str], None],
    ) -> None:
        self._session = session
        self._urls = urls
        self._pid_of = pid_of
        self._report = report
        self._watched: dict[str, _Watched] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, url in self._urls.items():
                group.create_task(self._ask(name, url), name=f"ask {name}")
            group.create_task(self._look(), name="look")

    def _current(self, name: str) -> _Watched | None:
        """The process that has this name now; None while there is none."""
        pid = self._pid_of(name)
        if pid is None:
            self._watched.pop(name, None)
        elif name not in self._watched or self._watched[name].pid != pid:
            self._watched[name] = _Watched(pid)
        return self._watched.get(name)

    async def _ask(self, name: str, url: str) -> None:
        while True:
            asked = self._current(name)
            try:
                async with self._session.get(url):
                    if asked is not None and asked is self._current(name):
                        asked.answered()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:  # it starts, has ended, or hangs
                if is_exhaustion(error) and asked is not None and asked.num_answers:
                    asked.answered()  # or this process lacks descriptors, which says nothing
            has_answered = asked is not None and asked.num_answers > 0
            await asyncio.sleep(_ASK_EVERY_S if has_answered else _ASK_EARLY_EVERY_S)

    async def _look(self) -> None:
        while True:
            try:
                self._look_at_all()
            except OSError as error:  # this process lacks descriptors: nothing can be said of the others
                if not is_exhaustion(error):
                    raise
            await asyncio.sleep(OBSERVE_S)

    def _look_at_all(self) -> None:
        for name in self._urls:
            if (watched := self._current(name)) is None:
                continue
            with contextlib.suppress(psutil.Error):
                watched.watch.observe(time.monotonic(), {name: watched.state()})
            if watched.watch.is_hung:
                del self._watched[name]
                self._report(f"{name} hangs; ending it")
                kill_group(watched.pid, signal.SIGKILL)
