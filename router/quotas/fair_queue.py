"""Deficit round robin between tenants, by tokens: whose request runs next while there is not capacity for all.

A tenant with a positive deficit is served, and its deficit is reduced by the cost of its request. A tenant without gets
a quantum, by its weight, and goes to the end of the line. So two tenants that always have waiting requests get tokens
in proportion to their weights, whatever the sizes of their requests. A tenant that begins to wait goes first, with one
quantum (as flows do in FQ-CoDel, RFC 8290), so a tenant with few requests waits for at most one request of another
tenant, not for a round. The actual cost of a request is settled afterwards.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUANTUM = 1024  # tokens, for a weight of 1

T = TypeVar("T")


@dataclass(slots=True)
class _Flow(Generic[T]):
    weight: float
    deficit: float
    tenant: str
    waiting: OrderedDict[T, float] = field(default_factory=OrderedDict)  # with its cost; the first one is the next

    @property
    def quantum(self) -> float:
        return QUANTUM * self.weight


class FairQueue(Generic[T]):
    """Requests of any number of tenants, and what each costs in tokens. Knows no clock."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[T]] = {}
        self._new: deque[_Flow[T]] = deque()  # they are before the others
        self._old: deque[_Flow[T]] = deque()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def num_of(self, tenant: str) -> int:
        """How many of a tenant's requests wait."""
        flow = self._flows.get(tenant)
        return 0 if flow is None else len(flow.waiting)

    def push(self, tenant: str, weight: float, item: T, cost: float) -> None:
        """Add a request."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = _Flow(weight, QUANTUM * weight, tenant)
            self._new.append(flow)
        flow.waiting[item] = cost
        self._num_waiting += 1

    def remove(self, tenant: str, item: T) -> None:
        """Remove a request that no longer waits. Idempotent."""
        flow = self._flows.get(tenant)
        if flow is not None and item in flow.waiting:
            self._leave(flow, item)

    def pop(self) -> T | None:
        """The next request; None if there is none."""
        if not self._num_waiting:
            return None
        num_passed = 0
        while True:
            line = self._new or self._old
            flow = line[0]
            if flow.deficit <= 0:
                flow.deficit += flow.quantum
                line.popleft()
                self._old.append(flow)
                num_passed += 1
                if num_passed > len(self._flows):  # nobody has a deficit left: many rounds in one step
                    self._pass_rounds()
                    num_passed = 0
            elif flow.waiting:
                item, cost = next(iter(flow.waiting.items()))
                flow.deficit -= cost
                self._leave(flow, item)
                return item
            else:
                line.popleft()
                if line is self._new:  # it would be new again with its next request, before the others' round is over
                    self._old.append(flow)
                else:
                    del self._flows[flow.tenant]

    def settle(self, tenant: str, tokens: float) -> None:
        """Charge the tenant what a request cost beyond its estimate; negative: a refund."""
        if (flow := self._flows.get(tenant)) is not None:
            flow.deficit -= tokens

    def _leave(self, flow: _Flow[T], item: T) -> None:
        del flow.waiting[item]
        self._num_waiting -= 1
        if not self._num_waiting:  # nobody has to share with anybody
            self._flows.clear()
            self._new.clear()
            self._old.clear()

    def _pass_rounds(self) -> None:
        flows = [flow for flow in self._flows.values() if flow.waiting]
        rounds = min(math.floor(-flow.deficit / flow.quantum) for flow in flows)
        if rounds > 0:
            for flow in self._flows.values():
                flow.deficit = min(flow.deficit + rounds * flow.quantum, flow.quantum)
