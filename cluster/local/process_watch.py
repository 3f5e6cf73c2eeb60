"""Ends routers and agents of a local cluster that hang, so that the supervisor restarts them.

The rules are those for an engine's HTTP server (`engine/hang_watch.py`). A process is watched from its first answer on,
since its start may take long.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp

from engine.hang_watch import OBSERVE_S, HangWatch, PartState, Timeouts, processor_of
from process.lifetime import kill_group

_ASK_EVERY_S = 4.0
_TIMEOUTS = Timeouts(hang_s=15.0, batch_s=0.0)  # ended after 30 s without processor time, after 60 s with it


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
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass  # it starts, has ended, or hangs
            await asyncio.sleep(_ASK_EVERY_S)

    async def _look(self) -> None:
        while True:
            for name, watched in tuple(self._watched.items()):
                if watched.pid != self._pid_of(name):
                    del self._watched[name]
                    continue
                watched.watch.observe(
                    time.monotonic(), {name: PartState(watched.num_answers, processor_of(watched.pid))}
                )
                if watched.watch.is_hung:
                    self._report(f"{name} hangs; ending it")
                    del self._watched[name]
                    kill_group(watched.pid, signal.SIGKILL)
            await asyncio.sleep(OBSERVE_S)
