"""At the limit of connections, a refusal costs no look at those that are open."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from router.http import connections as module
from router.http.connections import ClientConnections, ConnectionLimits

OPEN = 3000


@dataclass(eq=False)
class Busy:
    """A connection with a request in flight, until it is idle."""

    address: str = "10.0.0.1"
    deadline: float = math.inf
    is_idle: bool = False
    num_looks: int = 0
    made_way: bool = False

    @property
    def can_make_way(self) -> bool:
        self.num_looks += 1
        return self.is_idle

    def make_way(self) -> None:
        self.made_way = True

    def out_of_time(self) -> None:
        pass


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
def test_refused_connections_look_at_the_open_ones_once(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    loop = SimpleNamespace(time=lambda: clock.now, call_later=lambda *_: None)
    monkeypatch.setattr(module.asyncio, "get_running_loop", lambda: loop)
    connections = ClientConnections(ConnectionLimits(**{limit: OPEN}))
    open_ones = [Busy() for _ in range(OPEN)]
    assert all(connections.add(each) for each in open_ones)

    assert not any(connections.add(Busy()) for _ in range(OPEN))
    assert sum(each.num_looks for each in open_ones) == OPEN
    open_ones[7].is_idle = True
    clock.now += module._BUSY_S
    assert connections.add(Busy())
    assert open_ones[7].made_way
    assert len(connections) == OPEN
