"""Ends routers and agents of a local cluster that hang, so that the supervisor restarts them.

From a process's first answer on, the rules are those for an engine's HTTP server (`engine/hang_watch.py`). Until then
it starts, which may take long: it hangs only if it uses no processor time at all, or was stopped by a signal.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import psutil

from engine.hang_watch import OBSERVE_S, HangWatch, PartState, Timeouts, processor_of
from process.exhaustion import is_exhaustion
from process.lifetime import kill_group

_ASK_EVERY_S = 4.0
_ASK_EARLY_EVERY_S = 0.5  # until the first answer: clients may have had theirs before
_TIMEOUTS = Timeouts(hang_s=15.0, batch_s=0.0)  # ended after 30 s without processor time, after 60 s with it
# A process that has not answered yet is ended when it has used no processor time for so long.
_START_IDLE_S = 120.0
_START_STOPPED_S = 30.0  # if it was stopped by a signal


@dataclass(slots=True)
class _Starting:
    pid: int
    processor_s: float
    since: float  # when that was first seen


@dataclass(slots=True)
class _Watched:
    pid: int
    watch: HangWatch = field(default_factory=lambda: HangWatch(_TIMEOUTS))
    num_answers: int = 0


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
        self._starting: dict[str, _Starting] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name, url in self._urls.items():
                group.create_task(self._ask(name, url), name=f"ask {name}")
            group.create_task(self._look(), name="look")

    async def _ask(self, name: str, url: str) -> None:
        while True:
            pid = self._pid_of(name)
            try:
                async with self._session.get(url):
                    if pid is not None and pid == self._pid_of(name):
                        if name not in self._watched or self._watched[name].pid != pid:
                            self._watched[name] = _Watched(pid)
                        self._watched[name].num_answers += 1
            except (aiohttp.ClientError, OSError, TimeoutError) as error:  # it starts, has ended, or hangs
                if (
                    is_exhaustion(error) and name in self._watched
                ):  # or this process lacks descriptors, which says nothing
                    self._watched[name].num_answers += 1
            await asyncio.sleep(_ASK_EVERY_S if name in self._watched else _ASK_EARLY_EVERY_S)

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
            self._look_at_start(name, self._pid_of(name))
        for name, watched in tuple(self._watched.items()):
            if watched.pid != self._pid_of(name):
                del self._watched[name]
                continue
            watched.watch.observe(time.monotonic(), {name: PartState(watched.num_answers, processor_of(watched.pid))})
            if watched.watch.is_hung:
                del self._watched[name]
                self._end(name, watched.pid)

    def _look_at_start(self, name: str, pid: int | None) -> None:
        """End a process that hangs before its first answer."""
        try:
            if pid is None or (name in self._watched and self._watched[name].pid == pid):
                self._starting.pop(name, None)
                return
            process = psutil.Process(pid)
            times, is_stopped = process.cpu_times(), process.status() == psutil.STATUS_STOPPED
        except psutil.Error:  # it has just ended
            return
        now, used_s, known = time.monotonic(), times.user + times.system, self._starting.get(name)
        if known is None or (known.pid, known.processor_s) != (pid, used_s):
            self._starting[name] = _Starting(pid, used_s, now)
        elif now - known.since > (_START_STOPPED_S if is_stopped else _START_IDLE_S):
            del self._starting[name]
            self._end(name, pid)

    def _end(self, name: str, pid: int) -> None:
        self._report(f"{name} hangs; ending it")
        kill_group(pid, signal.SIGKILL)
