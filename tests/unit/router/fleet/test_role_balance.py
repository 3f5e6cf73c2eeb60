"""Which role is short of workers: a table of loads, and a simulated fleet whose load turns."""

import asyncio
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.routers.fleets import MAX_KV_TOKENS, UP
from support.routers.virtual_time import Clock

from cluster.config.router import RouterConfig, SloConfig
from router.fleet import role_changes
from router.fleet.fleet_state import FleetState, Holders, WorkerView
from router.fleet.queues import NO_QUEUES, Queues
from router.fleet.role_balance import RecentSpending, RoleLoad, role_loads, short_role, wanted_workers
from router.fleet.role_changes import RoleChanges
from router.fleet.saturation import NONE_WAITS
from router.fleet.worker_loads import Spent, WorkerLoads
from router.metrics import Metrics

BLOCKED, FULL = Queues(requests=10, awaiting_memory=10), Queues(requests=64, awaiting_memory=32, max_running=32)
CONFIG = RouterConfig(slo=SloConfig(first_token_s=2.0, event_gap_s=0.02))


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ((2, 0.22), (2, 0.96), "decode"),
        ((2, 2.50), (2, 0.10), "prefill"),
        ((2, 0.22), (2, 0.79), None),  # nothing is short
        ((1, 0.00), (3, 5.00), None),  # the last one stays
        ((2, 0.90), (2, 0.95), None),  # both are
        ((2, 0.41), (2, 1.00), None),  # the one that stayed would be
        ((2, 0.40), (2, 1.00), "decode"),
        ((2, 0.50), (2, 1.25), "decode"),  # requests wait, and the one that stays is just full
        ((2, 0.51), (2, 5.00), None),  # however short the other is
        ((2, 0.40), (2, 0.85), None),  # short, but no worker's worth is gained
        ((8, 0.60), (2, 0.85), None),
        ((8, 0.55), (2, 0.85), "decode"),
    ],
)
def test_table_of_loads(prefill: tuple[int, float], decode: tuple[int, float], expected: str | None) -> None:
    assert short_role({"prefill": RoleLoad(*prefill), "decode": RoleLoad(*decode)}) == expected
    swapped = {"decode": "prefill", "prefill": "decode"}.get(str(expected))
    assert short_role({"prefill": RoleLoad(*decode), "decode": RoleLoad(*prefill)}) == swapped


@pytest.mark.parametrize(
    ("num_workers", "share", "expected"),
    [(2, 0.0, 1), (0, 0.0, 1), (2, 0.41, 2), (2, 0.4, 1), (3, 0.8, 3), (3, 0.81, 4), (4, 1.2, 6), (2, 9.0, 4)],
)
def test_wanted_workers(num_workers: int, share: float, expected: int) -> None:
    assert wanted_workers(RoleLoad(num_workers, share)) == expected


def test_the_same_load_never_wants_the_worker_back() -> None:
    generator = Random(1)
    num_changes = 0
    for _ in range(20_000):
        numbers = {role: generator.randint(1, 9) for role in ("prefill", "decode")}
        demand = {role: generator.uniform(0, 8) for role in numbers}

        def loads(numbers=numbers, demand=demand) -> dict[str, RoleLoad]:
            return {role: RoleLoad(number, demand[role] / number) for role, number in numbers.items()}

        if (role := short_role(loads())) is not None:
            num_changes += 1
            other = "decode" if role == "prefill" else "prefill"
            numbers |= {role: numbers[role] + 1, other: numbers[other] - 1}
            assert short_role(loads()) in (role, None)
    assert num_changes > 1000


def loads_after(*looks: dict[str, Any]) -> dict[str, RoleLoad]:
    """The loads of p0 and d0 after reports, a second apart."""
    loads, spending = WorkerLoads(lambda: 0.0), RecentSpending()
    views = [WorkerView(name, role, incarnation="1", **UP) for name, role in (("p0", "prefill"), ("d0", "decode"))]
    fleet = FleetState({view.name: view for view in views}, loads, Holders())
    for second, told in enumerate(looks):
        loads["d0"].report(
            second, used_kv_tokens=0, max_kv_tokens=MAX_KV_TOKENS, spent=Spent(0, *told.get("steps", (0, 0)))
        )
        loads["p0"].report(second, used_kv_tokens=0, max_kv_tokens=0, spent=Spent(told.get("reading_us", 0)))
        if "queues" in told:
            loads["d0"].queues = told["queues"]
        loads["p0"].queues = told.get("blocked", NO_QUEUES)
        for _ in range(told.get("num_waiting", 0)):
            loads.add("p0", prompt_tokens=1000, kv_tokens=1000)
        spending.look(float(second), fleet)
    return role_loads(fleet, spending, CONFIG.slo, looks[-1].get("waiting", NONE_WAITS))


@pytest.mark.parametrize(
    ("looks", "prefill", "decode"),
    [
        ([{}, {}], 0.0, 0.0),
        ([{"reading_us": 7_000_000}], 0.0, 0.0),  # before the first look
        ([{"reading_us": 7_000_000}, {"reading_us": 7_250_000}], 0.25, 0.0),
        ([{}, {"reading_us": 4_000_000}], 1.0, 0.0),  # a batch of four seconds, counted at its end
        ([{"reading_us": 7_000_000}, {"reading_us": 100}], 0.0, 0.0),  # another engine's counts
        ([{"num_waiting": 10}], 1.0, 0.0),  # 2 s until they are read
        ([{"num_waiting": 10, "blocked": BLOCKED, "queues": FULL}], 0.0, 2.0),  # once decode has memory
        ([{}, {"steps": (100, 1_000_000)}], 0.0, 0.0),  # 10 ms a token
        ([{}, {"steps": (100, 1_500_000)}], 0.0, 0.5),
        ([{}, {"steps": (100, 9_000_000)}], 0.0, 1.0),  # however slow: prompts must not starve for it
        ([{"queues": Queues(requests=16, max_running=32)}], 0.0, 0.5),
        ([{"queues": FULL}], 0.0, 2.0),
        ([{"waiting": (8, 15_000)}], 1.5, 0.0),  # in the router, 3 s until they are read
        ([{"waiting": (8, 15_000), "queues": Queues(requests=32, max_running=32)}], 0.0, 1.25),
    ],
)
def test_loads_from_reports(looks: list[dict[str, Any]], prefill: float, decode: float) -> None:
    found = loads_after(*looks)
    assert found["prefill"] == RoleLoad(1, pytest.approx(prefill, abs=1e-6))
    assert found["decode"].share == pytest.approx(decode, abs=1e-6)


class Simulated:
    """Workers whose agents change roles at once, serve again two seconds later, and share a load evenly."""

    def __init__(self, num_prefill: int, num_decode: int, num_routers: int = 1) -> None:
        self.clock, self.loads = Clock(0.0), WorkerLoads(lambda: self.clock.now)
        names = [("prefill", i) for i in range(num_prefill)] + [("decode", i) for i in range(num_decode)]
        self.views = {f"{role}-{i}": WorkerView(f"{role}-{i}", role, incarnation="0", **UP) for role, i in names}
        self.configured = {name: view.role for name, view in self.views.items()}
        self.ready_at: dict[str, float] = {}
        self.changes: list[tuple[float, str, str]] = []
        self.random = Random(7)
        self.metrics = Metrics()
        self.routers = [RoleChanges(self, CONFIG, self.metrics, False, self.clock) for _ in range(num_routers)]  # type: ignore[arg-type]

    @property
    def state(self) -> FleetState:
        return FleetState(dict(self.views), self.loads, Holders())

    def link_of(self, view: WorkerView) -> Any:
        async def change_role(role: str, _drain_timeout_s: float) -> str:
            if self.views[view.name].role == role:  # another router was first
                return "done"
            self.changes.append((self.clock.now, view.name, role))
            incarnation = str(len(self.changes))
            self.views[view.name] = replace(view, role=role, incarnation=incarnation, is_ready=False)
            self.loads.forget(view.name)
            self.ready_at[view.name] = self.clock.now + 2
            return "done"

        endpoint = SimpleNamespace(role=self.configured[view.name])
        return SimpleNamespace(change_role=change_role, contact=SimpleNamespace(endpoint=endpoint))

    def numbers(self) -> tuple[int, int]:
        roles = [view.role for view in self.views.values()]
        return roles.count("prefill"), roles.count("decode")

    def run(self, seconds: int, prefill_demand: float, decode_demand: float) -> None:
        """Demands are workers that they keep busy, on average: each second's differs by up to a quarter."""
        for _ in range(seconds):
            self.clock.now += 1
            for name, at in list(self.ready_at.items()):
                if self.clock.now >= at:
                    self.views[name] = replace(self.views[name], is_ready=True)
                    del self.ready_at[name]
            ready = [view for view in self.views.values() if view.is_placeable]
            assert {view.role for view in ready} == {"prefill", "decode"}
            for view in ready:
                number = sum(each.role == view.role for each in ready)
                demand = prefill_demand if view.role == "prefill" else decode_demand
                share = demand / number * self.random.uniform(0.75, 1.25)
                load = self.loads[view.name]
                if view.role == "prefill":
                    spent = Spent(load.spent.reading_us + int(1e6 * min(1.0, share)))
                    load.report(self.clock.now, used_kv_tokens=0, max_kv_tokens=0, spent=spent)
                else:
                    queues = Queues(requests=int(64 * share), max_running=64)
                    load.report(self.clock.now, used_kv_tokens=0, max_kv_tokens=MAX_KV_TOKENS, queues=queues)
            for router in self.routers:
                asyncio.run(router.look())


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_load_that_turns_and_turns_back(num_routers: int) -> None:
    fleet = Simulated(4, 4, num_routers)
    fleet.run(300, 2.4, 2.4)
    assert fleet.changes == []
    fleet.run(300, 0.6, 4.4)  # answers
    assert fleet.numbers() == (2, 6)
    assert [role for _, _, role in fleet.changes] == ["decode"] * 2
    fleet.run(300, 4.4, 0.6)  # prompts
    assert fleet.numbers() == (6, 2)
    assert [role for _, _, role in fleet.changes] == ["decode"] * 2 + ["prefill"] * 4
    fleet.run(300, 2.4, 2.4)
    assert [role for _, _, role in fleet.changes] == ["decode"] * 2 + ["prefill"] * 4 + ["decode"] * 2
    assert {name: view.role for name, view in fleet.views.items()} == fleet.configured
    for (before, *_), (after, *_) in zip(fleet.changes, fleet.changes[1:], strict=False):
        assert after - before >= role_changes.PAUSE_S


def test_a_load_that_turns_back_at_once_changes_nothing() -> None:
    fleet = Simulated(2, 2)
    fleet.run(60, 0.4, 0.8)
    for _ in range(50):
        fleet.run(2, 0.2, 2.4)  # seconds in which decode is short
        fleet.run(13, 0.4, 0.4)
    assert fleet.changes == []
