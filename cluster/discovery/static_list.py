"""The workers of cluster.yaml as a source. They never change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from cluster.discovery.source import Endpoint


class StaticList:
    """A fixed list. Its workers have the names that it gives them."""

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
