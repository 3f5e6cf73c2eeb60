"""Workers by the Kubernetes API: those behind a Service, or Pods by their labels, watched while they come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from cluster.config.discovery import PORT_NAME, KubernetesDiscovery
from cluster.discovery.kubernetes_objects import Agent, Standing, agents_of_pod, agents_of_slice, name_of, version_of
from cluster.discovery.source import Endpoint
from cluster.errors import SourceUnavailable, WatchExpired

if TYPE_CHECKING:
    from cluster.discovery.kubernetes_api import KubernetesApi, Selection

_WATCH_S = 60  # until a watch is begun anew: a connection that has died without a word is noticed 10 s later
_FIRST_PAUSE_S = 0.5  # after a failure; doubled after each one more in a row
_MAX_PAUSE_S = 15.0
_JITTER = 0.2
_MIN_WATCH_S = 1.0  # one that ends sooner counts as a failure, so that nobody asks in a tight loop
_GRACE_S = 2.0  # an agent in no object leaves so much later: Kubernetes moves endpoints from one slice to another
_MAX_OBJECTS = 8192

log = logging.getLogger(__name__)


class KubernetesSource:
    """The endpoints of one role. Known endpoints stay while the API server does not answer, for however long.

    Keeps a few bytes per agent and no API objects. An agent leaves immediately when its Pod ends.
    """

    def __init__(
        self,
        looked_for: KubernetesDiscovery,
        role: str,
        *,
        port: int | None = None,  # of agents; None: that which Kubernetes calls `control`
        kubeconfig: Path | None = None,  # None: this process runs in a Pod
        only_ready: bool = False,  # an agent leaves also when it is not ready
        random: Random | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._by_service = looked_for.service is not None
        self.label = f"Kubernetes {'service' if self._by_service else 'pods'} {looked_for.service or looked_for.pods}"
        self.roles = frozenset({role})
        self.endpoints: frozenset[Endpoint] = frozenset()
        self.has_answered = False
        self._looked_for = looked_for
        self._role = role
        self._port: int | str = PORT_NAME if port is None else port
        self._kubeconfig = kubeconfig
        self._present = {Standing.READY} if only_ready else {Standing.READY, Standing.UNREADY}
        self._random = random or Random()
        self._pause = pause
        self._grace_s = grace_s
        self._version = ""  # from which a watch goes on; empty: all objects must be listed first
        self._objects: dict[str, dict[Agent, Standing]] = {}  # by name: its agents
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # addresses that no object names any more
        self._on_change: Callable[[], None] | None = None  # while followed
        self._has_told_of_many = False

    async def refresh(self) -> None:
        """Ask once. Raises SourceUnavailable."""
        await asyncio.to_thread(_load_client)
        from cluster.discovery.kubernetes_api import connected

        async with connected(self._selection(), self._kubeconfig) as api:
            await self._list(api)

    async def follow(self, on_change: Callable[[], None]) -> None:
        """List, then watch, until cancelled. Failures are retried after growing pauses."""
        await asyncio.to_thread(_load_client)
        from cluster.discovery.kubernetes_api import connected

        self._on_change = on_change
        self._version = ""
        failures = _Failures(self)
        try:
            while True:
                try:
                    async with connected(self._selection(), self._kubeconfig) as api:
                        await self._follow(api, failures)
                except SourceUnavailable as error:
                    if isinstance(error, WatchExpired):
                        self._version = ""
                    failures.add(error)
                await self._pause(failures.pause_s * self._random.uniform(1 - _JITTER, 1 + _JITTER))
        finally:
            self._on_change = None
            for timer in self._leaving.values():
                timer.cancel()
            self._leaving.clear()

    async def _follow(self, api: KubernetesApi, failures: _Failures) -> None:
        """Returns if watches end too soon. Raises SourceUnavailable."""
        loop = asyncio.get_running_loop()
        if not self._version:
            await self._list(api)  # no end of failures: each watch after it may expire at once
        lasting: list[asyncio.TimerHandle] = []

        def opened() -> None:
            lasting.append(loop.call_later(_MIN_WATCH_S, failures.over))  # it may still fail at once

        while True:
            begun_s = loop.time()
            try:
                async for kind, found in api.watch(self._version, _WATCH_S, opened):
                    self._take(kind, found)
                    failures.over()
            finally:
                while lasting:
                    lasting.pop().cancel()
            if loop.time() - begun_s < _MIN_WATCH_S:
                failures.count += 1
                return

    async def _list(self, api: KubernetesApi) -> None:
        found, version = await api.listed()
        self._objects = {}
        for each in found:
            self._put(each)
        self._version = version
        is_first, self.has_answered = not self.has_answered, True
        self._settle(is_first)

    def _take(self, kind: str, found: dict[str, Any]) -> None:
        self._version = version_of(found) or self._version
        if kind in ("ADDED", "MODIFIED"):
            self._put(found)
        elif kind == "DELETED":
            self._objects.pop(name_of(found), None)
        else:
            return  # a bookmark: a version, and nothing else
        self._settle(False)

    def _put(self, found: dict[str, Any]) -> None:
        name = name_of(found)
        if not name:
            return
        if name not in self._objects and len(self._objects) >= _MAX_OBJECTS:
            if not self._has_told_of_many:
                fields = {"source": self.label, "used": _MAX_OBJECTS}
                log.error(
                    "more Kubernetes objects selected than can be followed; ignoring the rest", extra={"fields": fields}
                )
            self._has_told_of_many = True
            return
        self._objects[name] = (agents_of_slice if self._by_service else agents_of_pod)(found, self._port)

    def _settle(self, is_first: bool) -> None:
        """Derive the endpoints. A Pod may be in two slices, and an address may move from one Pod to another."""
        standings: dict[Agent, Standing] = {}
        for agents in self._objects.values():
            for agent, standing in agents.items():
                standings[agent] = max(standing, standings.get(agent, standing))
        named = {agent.address for agent in standings}
        present = {agent.address for agent, standing in standings.items() if standing in self._present}
        before = self.endpoints
        for address in {endpoint.address for endpoint in before} - named:
            if address in self._leaving:
                present.add(address)
            elif self._on_change is not None and self._grace_s:
                present.add(address)
                loop = asyncio.get_running_loop()
                self._leaving[address] = loop.call_later(self._grace_s, self._leave, address)
        for address in self._leaving.keys() - (present - named):
            self._leaving.pop(address).cancel()
        self.endpoints = frozenset(Endpoint(address, self._role) for address in present)
        if self._on_change is not None and (is_first or self.endpoints != before):
            self._on_change()

    def _leave(self, address: str) -> None:
        del self._leaving[address]
        self.endpoints -= {Endpoint(address, self._role)}
        if self._on_change is not None:
            self._on_change()

    def _selection(self) -> Selection:
        from cluster.discovery.kubernetes_api import Selection

        if self._by_service:
            labels = f"kubernetes.io/service-name={self._looked_for.service}"
            return Selection("endpointslices", labels, self._looked_for.namespace)
        return Selection("pods", self._looked_for.pods or "", self._looked_for.namespace)


def _load_client() -> None:
    """Import the client in a thread: it takes most of a second."""
    from cluster.discovery.kubernetes_api import load_client

    load_client()


class _Failures:
    """Consecutive failures: determines the pause, and avoids repeated log lines."""

    def __init__(self, source: KubernetesSource) -> None:
        self.count = 0
        self._source = source
        self._told = ""

    @property
    def pause_s(self) -> float:
        return min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** max(0, min(self.count - 1, 16)))

    def add(self, error: SourceUnavailable) -> None:
        """Count a failure. An outage is logged once, and again if its reason changes; expired watches at level info."""
        self.count += 1
        fields = {"source": self._source.label, "kept": len(self._source.endpoints), "reason": str(error)}
        if isinstance(error, WatchExpired):
            log.info("the watch of workers has expired; listing them again", extra={"fields": fields})
        elif self._told != str(error):
            self._told = str(error)
            log.warning("workers cannot be looked up; keeping those that are known", extra={"fields": fields})

    def over(self) -> None:
        """The API server has answered: reset the failures."""
        self.count = 0
        if self._told:
            log.info("workers are looked up again", extra={"fields": {"source": self._source.label}})
        self._told = ""
