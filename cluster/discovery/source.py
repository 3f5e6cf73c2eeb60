"""The interface of a source of workers, the list of cluster.yaml as one, and what keeps one going."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cluster.config.fields import host_of

log = logging.getLogger(__name__)

_RETRY_S = 5.0  # after a source that broke


@dataclass(frozen=True, slots=True, order=True)
class Endpoint:
    """Where the agent of a worker listens."""

    address: str  # host:port, as gRPC takes it
    role: str  # that the worker must have
    name: str = ""  # of a worker of cluster.yaml; empty: as the worker describes itself

    @property
    def host(self) -> str:
        """The address without its port."""
        return host_of(self.address)


class WorkerSource(Protocol):
    """Provides endpoints of workers. Workers behind them may be down; the roster finds that out."""

    @property
    def label(self) -> str:
        """The source's name for logs."""

    @property
    def roles(self) -> frozenset[str]:
        """The roles of the workers that it may find."""

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """The endpoints known now. An outage of the source changes nothing."""

    @property
    def has_answered(self) -> bool:
        """True once `endpoints` is based on an answer."""

    async def refresh(self) -> None:
        """Query the source once. Raises SourceUnavailable."""

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Keep `endpoints` current until cancelled; `on_change` is called after every change, and the first answer."""


class StaticList:
    """The workers of cluster.yaml, which never change. They have the names that it gives them."""

    label = "cluster.yaml"
    has_answered = True

    def __init__(self, workers: Mapping[str, tuple[str, str]]) -> None:  # name -> (role, host:port of the agent)
        self.endpoints = frozenset(Endpoint(address, role, name) for name, (role, address) in workers.items())
        self.roles: frozenset[str] = frozenset()  # that may come; these are there

    async def refresh(self) -> None:
        """There is nothing to ask."""

    async def follow(self, on_change: Callable[[], None]) -> None:
        """There is nothing to follow."""
        await asyncio.Event().wait()


async def keep_following(source: WorkerSource, on_change: Callable[[], None]) -> None:
    """Follow the source until cancelled, again whenever that fails unexpectedly."""
    while True:
        try:
            await source.follow(on_change)
        except Exception:  # the edge of this source's task; the workers that are known must be kept
            log.exception("worker discovery failed", extra={"fields": {"source": source.label}})
        await asyncio.sleep(_RETRY_S)
