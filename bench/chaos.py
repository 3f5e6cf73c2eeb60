"""Kills or stops one process of a real cluster: what clients see, how fast it recovers, and what is left behind.

Each case has requests in flight, in every phase that the router tells apart: half of them stream already when the
others arrive, some for adapters that no worker has. Then comes the signal, and until every process is ready again, one
short request a second. A stopped process is never continued: an agent has to notice that of its engine, and
`prelude up` that of a router or an agent.

Complete answers are compared with those of a quiet cluster. Where another worker could serve, a request must not fail
before the first byte of its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.errors import SystemFailed
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.systems.shaken_cluster import LAYOUTS, Answer, Kind, ShakenCluster, prepare
from cluster.errors import StartError
from cluster.local.supervisor import local_cluster

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
VICTIMS = {"pair": ("prefill-0", "decode-0"), "pairs": ("prefill-0", "decode-0"), "unified": ("unified-0",)}
_PARTS = ("agent", "server", "scheduler", "detokenizer")
_NUM_ADAPTERS = 4
_NUM_COLD = 4  # adapters that no worker has yet, in each case

PROBE = Kind(96, 4)
LATE = Kind(512, 16)  # read in eight steps


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    layouts: tuple[str, ...] = ("pair",)
    in_flight: tuple[int, ...] = (0, 32)
    signals: tuple[str, ...] = ("kill", "stop")
    parts: tuple[str, ...] = ("router", *_PARTS)
    generated_tokens: int = 48
    client_deadline_s: float = 120.0  # after which a client gives up: a hang
    ready_within_s: float = 600.0


QUICK = Options(layouts=("unified",), in_flight=(8,), signals=("kill",), parts=("scheduler",))


@dataclass(slots=True)
class Seen:
    """What some clients of one case saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # from the signal, or from its own beginning if that was later
    answers: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer, signalled_at: float) -> None:
        self.answers.append(answer)
        self.outcomes[answer.outcome] += 1
        if answer.ended_at > signalled_at:
            self.longest_s = max(self.longest_s, answer.ended_at - max(answer.began_at, signalled_at))

    def failed_unsent(self, signalled_at: float) -> int:
        """Requests that failed after the signal, without a byte of an answer."""
        return sum(
            answer.outcome not in ("answered", "wrong answer")
            and answer.first_byte_at == float("inf")
            and answer.ended_at > signalled_at
            for answer in self.answers
        )

    def by_phase(self, phases: dict[str, str]) -> dict[str, dict[str, int]]:
        """Outcomes by the phase at the signal. Without an answer from the router, a client cannot tell its request."""
        found: dict[str, Counter[str]] = {}
        for answer in self.answers:
            phase = phases.get(answer.request_id, "ended" if answer.request_id else "unknown")
            found.setdefault(phase, Counter())[answer.outcome] += 1
        return {phase: dict(outcomes) for phase, outcomes in sorted(found.items())}


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run all cases, print and write them; returns the file's content. Raises BenchError.

    The file is written after each case, so that a run that is ended early leaves what it has seen.
    """
    require_folders(json_path)
    document: dict[str, Any] = {
        **provenance.head("chaos", command, asdict(options)),
        "summary": summary([]),
        "rows": [],
    }
    with growing_json(document, json_path, "after all cases") as write:
        try:
            asyncio.run(_run(options, document, write, progress))
        except StartError as error:
            raise SystemFailed(str(error)) from error
    progress(f"{document['summary']}")
    return document


async def _run(
    options: Options, document: dict[str, Any], write: Callable[[], None], progress: Callable[[str], None]
) -> None:
    for layout in options.layouts:
        with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
            async with contextlib.aclosing(_rows(layout, options, Path(folder), progress)) as rows:
                async for row in rows:
                    document["rows"].append(row)
                    document["summary"] = summary(document["rows"])
                    write()


async def _rows(
    layout: str, options: Options, folder: Path, progress: Callable[[str], None]
) -> AsyncGenerator[dict[str, Any], None]:
    targets = _targets(layout, options)
    num_cold = _NUM_COLD * len(targets) * len(options.signals) * sum(number > 0 for number in options.in_flight)
    config = await asyncio.to_thread(prepare, layout, _NUM_ADAPTERS + num_cold, folder)
    progress(f"starting the cluster: {', '.join(LAYOUTS[layout])}")
    async with (
        local_cluster(config, folder / "logs") as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        limits = {"deadline_s": options.client_deadline_s, "ready_within_s": options.ready_within_s}
        chaos = _Chaos(options, ShakenCluster(cluster, session, **limits))
        await chaos.learn_answers()
        for name in options.signals:
            for worker, part in targets:
                for in_flight in options.in_flight:
                    row = {"layout": layout, **await chaos.case(worker, part, name, in_flight)}
                    progress(f"  {row}")
                    yield row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What must be 0, and the longest times. Alone in its role, a worker's requests have nowhere else to go."""
    others = [row for row in rows if row["layout"] != "pair" and row["victim"] != "router"]
    return {
        "cases": len(rows),
        "wrong_answers": sum(row["wrong_answers"] for row in rows),
        "hung": sum(row["hung"] for row in rows),
        "unsent_failed": sum(row["unsent_failed"] for row in others),
        "left_behind": sum(bool(row["left_behind"]) for row in rows),
        "not_ready": sum(not row["is_ready"] for row in rows),
        "longest_s": max((row["longest_s"] for row in rows), default=0.0),
        "longest_ready_s": max((row["ready_s"] for row in rows), default=0.0),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """What a summary says that must not be."""
    return [
        f"{found[name]} {name.replace('_', ' ')}"
        for name in ("wrong_answers", "hung", "unsent_failed", "left_behind", "not_ready")
        if found.get(name)
    ]


def _targets(layout: str, options: Options) -> list[tuple[str, str]]:
    """(worker, part); the router is no part of a worker."""
    of_workers = [(worker, part) for worker in VICTIMS[layout] for part in options.parts if part != "router"]
    return ([("", "router")] if "router" in options.parts else []) + of_workers


class _Chaos:
    """Clients that know the right answers, and the signals."""

    def __init__(self, options: Options, system: ShakenCluster) -> None:
        self._options = options
        self._system = system
        self._early = Kind(96, options.generated_tokens)
        self._answers: dict[tuple[int, Kind], str] = {}  # (adapter, sizes) -> text
        self._next_cold = _NUM_ADAPTERS

    async def learn_answers(self) -> None:
        for adapter in range(_NUM_ADAPTERS):
            for kind in (self._early, LATE, PROBE):
                await self._right(adapter, kind)
        at_once = max(1, *self._options.in_flight)  # as many connections as later
        await asyncio.gather(*(self._system.ask(number % _NUM_ADAPTERS, PROBE) for number in range(at_once)))
        self._system.count_what_is_kept()

    async def case(self, worker: str, part: str, name: str, in_flight: int) -> dict[str, Any]:
        await self._system.until_ready()
        victim, started = self._system.process(worker, part), asyncio.Event()
        num_late = min(in_flight // 2, 3 * _NUM_COLD)
        cold = [*range(self._next_cold, self._next_cold + min(_NUM_COLD, num_late))]
        self._next_cold += len(cold)
        asked: list[tuple[int, Kind, asyncio.Task[Answer]]] = []
        probed: list[tuple[int, Kind, asyncio.Task[Answer]]] = []
        async with asyncio.TaskGroup() as group:

            def send(to: list[tuple[int, Kind, asyncio.Task[Answer]]], adapter: int, kind: Kind) -> None:
                to.append((adapter, kind, group.create_task(self._system.ask(adapter, kind, started))))

            for number in range(in_flight - num_late):
                send(asked, number % _NUM_ADAPTERS, self._early)
            if in_flight:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(started.wait(), 30)
            for number in range(num_late):
                send(asked, cold[number] if number < len(cold) else number % _NUM_ADAPTERS, LATE)
            phases = await self._system.phases(num_late // 2)
            signalled_at = time.monotonic()
            victim.send_signal(SIGNALS[name])
            is_ready = False
            while not is_ready and time.monotonic() - signalled_at < self._options.ready_within_s:
                send(probed, len(probed) % _NUM_ADAPTERS, PROBE)
                await asyncio.sleep(1.0)
                is_replaced = not _is_there(victim) and self._system.is_running(worker, part)
                is_ready = is_replaced and await self._system.is_ready()
            ready_s = time.monotonic() - signalled_at
        flying, probing = Seen(), Seen()
        for seen, requests in ((flying, asked), (probing, probed)):
            for adapter, kind, task in requests:
                seen.add(await self._compared(adapter, kind, task.result()), signalled_at)
        return {
            "victim": f"{worker} {part}".strip(),
            "signal": name,
            "in_flight": in_flight,
            "phases": flying.by_phase(phases),
            "outcomes": dict(flying.outcomes),
            "longest_s": round(flying.longest_s, 1),
            "probe_outcomes": dict(probing.outcomes),
            "longest_probe_s": round(probing.longest_s, 1),
            "ready_s": round(ready_s, 1),
            "is_ready": is_ready,
            "wrong_answers": flying.outcomes["wrong answer"] + probing.outcomes["wrong answer"],
            "hung": flying.outcomes["hung"] + probing.outcomes["hung"],
            "unsent_failed": flying.failed_unsent(signalled_at) + probing.failed_unsent(signalled_at),
            "left_behind": await self._system.left_behind(),
            "descriptors": {of: use.descriptors for of, use in self._system.uses().items()},
        }

    async def _compared(self, adapter: int, kind: Kind, answer: Answer) -> Answer:
        """The answer; if it is complete and not the adapter's, a wrong one."""
        if answer.outcome != "answered" or answer.text == await self._right(adapter, kind):
            return answer
        return replace(answer, outcome="wrong answer")

    async def _right(self, adapter: int, kind: Kind) -> str:
        """The text of a quiet cluster."""
        if (adapter, kind) not in self._answers:
            await self._system.until_ready()
            answer = await self._system.ask(adapter, kind)
            if answer.outcome != "answered":
                raise SystemFailed(f"in a quiet cluster, a request ended as: {answer.outcome}")
            self._answers[adapter, kind] = answer.text
        return self._answers[adapter, kind]


def _is_there(victim: psutil.Process) -> bool:
    """Whether a process that should have been replaced still exists."""
    try:
        return victim.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
