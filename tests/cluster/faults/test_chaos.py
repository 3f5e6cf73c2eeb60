"""Kills or stops each process of a real cluster: what clients see, and what is left behind.

Each case has requests in flight, in every phase that the router tells apart: half of them stream already when the
others arrive, some for adapters that no worker has. Then comes the signal, and until every process is ready again, one
short request a second. A stopped process is never continued: an agent has to notice that of its engine, and
`prelude up` that of a router or an agent.

Complete answers are compared with those of a quiet cluster. Where another worker could serve, a request must not fail
before the first byte of its answer.
"""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import psutil
import pytest
from support.clusters.shaken_cluster import LAYOUTS, READY_WITHIN_S, Answer, Kind, ShakenCluster, shaken_cluster

from cluster.control import control_pb2 as pb

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(7200)]

PARTS = ("agent", "server", "scheduler", "detokenizer")
_EVERY_PART = tuple((worker, part) for worker in ("prefill-0", "decode-0") for part in PARTS)
_MANY_PREFILL = (("decode-0", "scheduler"), ("decode-0", "agent"), ("prefill-0", "scheduler"))
VICTIMS = {
    "pair": _EVERY_PART,
    "pairs": _EVERY_PART,
    "unified": tuple(("unified-0", part) for part in PARTS),
    "2p+1d": _MANY_PREFILL,
    "3p+1d": _MANY_PREFILL,
}
IN_FLIGHT = (0, 32)
NUM_ADAPTERS = 4
NUM_COLD = 4  # adapters that no worker has yet, in each case with requests in flight

EARLY = Kind(96, 48)
LATE = Kind(512, 16)  # read in eight steps
PROBE = Kind(96, 4)


def targets(layout: str) -> list[tuple[str, str]]:
    """(worker, part); the router is no part of a worker."""
    return [("", "router"), *VICTIMS[layout]]


def has_others(layout: str, worker: str) -> bool:
    """Whether another worker has the same role."""
    roles = [*LAYOUTS[layout].values()]
    return bool(worker) and roles.count(LAYOUTS[layout][worker]) > 1


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_answer_is_wrong_and_nobody_hangs(layout: str, name: str, tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        num_cold = NUM_COLD * len(targets(layout))
        faults: list[str] = []
        async with shaken_cluster(layout, NUM_ADAPTERS + num_cold, tmp_path) as system:
            chaos = Chaos(system)
            await chaos.learn_answers()
            for worker, part in targets(layout):
                for in_flight in IN_FLIGHT:
                    others = has_others(layout, worker)
                    found = await chaos.case(worker, part, signal.Signals[name], in_flight, has_others=others)
                    faults += [f"{worker} {part}, {in_flight} in flight: {fault}" for fault in found]
        return faults

    assert asyncio.run(scenario()) == []


# Of workers that change their role: each part three times. There always is another worker of the role that one leaves.
CHANGING = (
    ("prefill-1", "scheduler"),
    ("decode-1", "agent"),
    ("prefill-1", "agent"),
    ("decode-1", "scheduler"),
    ("prefill-1", "scheduler"),
    ("decode-1", "agent"),
)


@pytest.mark.parametrize("moment", ["drained", "switched", "not announced"])
def test_a_worker_that_changes_its_role_may_end(moment: str, tmp_path: Path) -> None:
    """A worker becomes what it is not, and its agent or its engine's scheduler ends meanwhile.

    It is killed while its requests finish, when it has none left and its engine begins to switch, or when its agent
    in the new role is there and has not said that it is ready. An agent that ends comes back in the role of
    cluster.yaml, an engine in the new one.
    """

    async def scenario() -> list[str]:
        faults: list[str] = []
        num_adapters = NUM_ADAPTERS + NUM_COLD * len(CHANGING)
        async with shaken_cluster("pairs", num_adapters, tmp_path, role_changes="manual") as system:
            chaos = Chaos(system)
            await chaos.learn_answers()
            for worker, part in CHANGING:
                await system.until_ready()
                before = await system.role(worker)
                role = "decode" if before == "prefill" else "prefill"
                async with RoleChange(system, worker, role) as change:
                    until = {"drained": change.drains, "switched": change.answers, "not announced": change.follows}
                    found = await chaos.case(worker, part, signal.SIGKILL, 16, has_others=True, until=until[moment])
                expected = LAYOUTS["pairs"][worker] if part == "agent" else role
                if (is_now := await system.role(worker)) != expected:
                    found.append(f"it is a {is_now} worker, not {expected}")
                faults += [f"{worker} {part}, {before} to {role}: {fault}" for fault in found]
        return faults

    assert asyncio.run(scenario()) == []


class RoleChange:
    """Has a worker change its role. The waits are for what can be seen from outside."""

    def __init__(self, system: ShakenCluster, worker: str, role: str) -> None:
        self._system, self._worker, self._role = system, worker, role
        self._asked: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "RoleChange":
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._asked is not None, "the change was never asked for"
        await asyncio.wait([self._asked])

    async def _ask(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # its agent has ended
            async with self._system.agent(self._worker) as agent:
                request = pb.ChangeRoleRequest(role=f"ROLE_{self._role.upper()}", deadline_s=120)
                await agent.ChangeRole(request, timeout=130)

    async def drains(self) -> None:
        async with self._system.agent(self._worker) as agent:
            states = agent.WatchState(pb.WatchStateRequest(), timeout=60)
            self._asked = asyncio.create_task(self._ask())
            async for state in states:
                if state.draining:
                    return

    async def answers(self) -> None:
        self._asked = asyncio.create_task(self._ask())
        await asyncio.wait([self._asked])

    async def follows(self) -> None:
        await self.answers()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):  # between two agents
                    if await self._system.role(self._worker) == self._role:
                        return


class Chaos:
    """Clients that know the right answers, and the signals."""

    def __init__(self, system: ShakenCluster) -> None:
        self._system = system
        self._answers: dict[tuple[int, Kind], str] = {}  # (adapter, sizes) -> text
        self._next_cold = NUM_ADAPTERS

    async def learn_answers(self) -> None:
        for adapter in range(NUM_ADAPTERS):
            for kind in (EARLY, LATE, PROBE):
                await self._right(adapter, kind)
        at_once = max(IN_FLIGHT)  # as many connections as later
        await asyncio.gather(*(self._system.ask(number % NUM_ADAPTERS, PROBE) for number in range(at_once)))
        self._system.count_what_is_kept()

    async def case(
        self,
        worker: str,
        part: str,
        sent: int,
        in_flight: int,
        *,
        has_others: bool,
        until: Callable[[], Awaitable[None]] | None = None,
    ) -> list[str]:
        """What must not be. `has_others`: another worker can serve the victim's requests. `until`: the signal waits."""
        await self._system.until_ready()
        victim, started = self._system.process(worker, part), asyncio.Event()
        num_late = min(in_flight // 2, 3 * NUM_COLD)
        cold = [*range(self._next_cold, self._next_cold + min(NUM_COLD, num_late))]
        self._next_cold += len(cold)
        asked: list[tuple[int, Kind, asyncio.Task[Answer]]] = []
        async with asyncio.TaskGroup() as group:

            def send(adapter: int, kind: Kind) -> None:
                asked.append((adapter, kind, group.create_task(self._system.ask(adapter, kind, started))))

            for number in range(in_flight - num_late):
                send(number % NUM_ADAPTERS, EARLY)
            if in_flight:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(started.wait(), 30)
            for number in range(num_late):
                send(cold[number] if number < len(cold) else number % NUM_ADAPTERS, LATE)
            phases = await self._system.phases(num_late // 2)
            if until is not None:
                await until()
            signalled_at = time.monotonic()
            victim.send_signal(sent)
            is_ready = False
            while not is_ready and time.monotonic() - signalled_at < READY_WITHIN_S:
                send(len(asked) % NUM_ADAPTERS, PROBE)
                await asyncio.sleep(1.0)
                is_replaced = not is_there(victim) and self._system.is_running(worker, part)
                is_ready = is_replaced and await self._system.is_ready()
        faults = [] if is_ready else ["not ready again"]
        outcomes = Counter[str]()
        for adapter, kind, task in asked:
            answer = task.result()
            outcome = answer.outcome
            if outcome == "answered" and answer.text != await self._right(adapter, kind):
                outcome = "wrong answer"
            outcomes[outcome] += 1
            if outcome in ("wrong answer", "hung"):
                faults.append(outcome)
            elif outcome != "answered" and has_others and is_unsent(answer, signalled_at):
                faults.append(f"{outcome} in phase {phases.get(answer.request_id, 'unknown')}")
        faults += await self._system.left_behind()
        print(f"{worker} {part}, {in_flight} in flight: {dict(outcomes)}, {faults or 'no faults'}", flush=True)
        return faults

    async def _right(self, adapter: int, kind: Kind) -> str:
        """The text of a quiet cluster."""
        if (adapter, kind) not in self._answers:
            await self._system.until_ready()
            answer = await self._system.ask(adapter, kind)
            assert answer.outcome == "answered", f"in a quiet cluster, a request ended as: {answer.outcome}"
            self._answers[adapter, kind] = answer.text
        return self._answers[adapter, kind]


def is_unsent(answer: Answer, signalled_at: float) -> bool:
    """Whether it ended after the signal without a byte of an answer."""
    return answer.first_byte_at == float("inf") and answer.ended_at > signalled_at


def is_there(victim: psutil.Process) -> bool:
    """Whether a process that should have been replaced still exists."""
    try:
        return victim.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
