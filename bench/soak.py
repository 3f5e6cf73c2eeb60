"""A long steady load on a real cluster with disconnecting clients and killed processes: memory, descriptors, latencies.

First the capacity is measured, with a fixed number of clients. Then requests arrive at random at a share of it, under
many adapters of Zipf popularity, whatever becomes of the ones before; some clients leave early; and now and then one
process is killed. Complete answers are compared with those of a quiet cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import psutil

from bench.errors import SystemFailed
from bench.load.loops import Loop
from bench.load.pacing import due_times
from bench.load.record import Record
from bench.load.strict import closed, requests_per_s, stopwatch
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.measuring.quantile import quantile
from bench.systems.shaken_cluster import LAYOUTS, Kind, ShakenCluster, prepare
from bench.workloads.session import Request, Session
from cluster.errors import StartError
from cluster.local.supervisor import local_cluster

BACK_WITHIN_S = 30.0
SLOW = 1.5  # times the p99 before the first kill: not back to normal
_SAMPLE_EVERY_S = 5.0
_WRITE_EVERY_S = 60.0
_YOUNG_S = 60.0  # a process fills its caches
_CLIENT_DEADLINE_S = 120.0  # after which a client gives up: a hang
_READY_WITHIN_S = 600.0
_MAX_IN_FLIGHT = 512  # more clients wait for nothing but each other
_PARTS = ("agent", "server", "scheduler", "detokenizer")
LEFT = "left"  # the outcome of a client that went away by itself


@dataclass(frozen=True, slots=True)
class Options:
    """One run."""

    minutes: float = 30.0
    load: float = 0.8  # of the measured capacity
    adapters: int = 200
    kill_every_s: float = 60.0
    layout: str = "unified"
    generated_tokens: int = 16
    aborted: float = 0.05  # share of the clients that leave early
    clients: int = 16  # when capacity is measured
    capacity_requests: int = 200
    seed: int = 1


QUICK = Options(minutes=2.0, adapters=20, capacity_requests=60)


@dataclass(frozen=True, slots=True)
class Kill:
    at_s: float
    victim: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One client's request. Times are seconds since the start of the load."""

    began_s: float
    seconds: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory and descriptors of one process, or of all processes of one engine, at one time.

    `pid`: of its first process, which a kill changes.
    """

    at_s: float
    of: str
    mib: float
    descriptors: int
    pid: int = 0


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run, print and write the summary; returns the file's content. Raises BenchError."""
    require_folders(json_path)
    facts = provenance.head("soak", command, asdict(options))
    document: dict[str, Any] = {**facts, "ended": "early"}

    def write(found: dict[str, Any]) -> None:
        document.update(found)
        write_json(document, json_path)

    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        try:
            asyncio.run(_measure(options, Path(folder), write, progress))
        except StartError as error:
            write({"ended": f"early: {error}"})
            raise SystemFailed(str(error)) from error
        except SystemFailed as error:
            write({"ended": f"early: {error}"})
            raise
    progress(table(document))
    return document


async def _measure(
    options: Options, folder: Path, write: Callable[[dict[str, Any]], None], progress: Callable[[str], None]
) -> None:
    config = await asyncio.to_thread(prepare, options.layout, options.adapters, folder)
    progress(f"starting the cluster: {', '.join(LAYOUTS[options.layout])}")
    async with (
        local_cluster(config, folder / "logs") as cluster,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        known = ShakenCluster(cluster, session, deadline_s=_CLIENT_DEADLINE_S, ready_within_s=_READY_WITHIN_S)
        soak = _Soak(options, known, write)
        await soak.learn_answers()
        capacity = await soak.capacity()
        write({"capacity": round(capacity, 2)})
        known.count_what_is_kept()
        progress(f"capacity {capacity:.1f} requests/s; load {options.load * capacity:.1f} for {options.minutes:g} min")
        await soak.load(options.load * capacity, progress)
        write(soak.summary())
        await known.until_ready()
        write({"left_behind": await known.left_behind(), "ended": "after all of the load"})


class _Soak:
    def __init__(self, options: Options, known: ShakenCluster, write: Callable[[dict[str, Any]], None]) -> None:
        self._options = options
        self._known = known
        self._write = write
        self._kind = Kind(96, options.generated_tokens)
        self._random = Random(options.seed)
        self._weights = [1 / (rank + 1) for rank in range(options.adapters)]
        self._right: dict[int, str] = {}  # by adapter
        self._answers: list[Answer] = []
        self._kills: list[Kill] = []
        self._samples: list[Sample] = []

    async def learn_answers(self) -> None:
        for adapter in range(self._options.adapters):
            answer = await self._known.ask(adapter, self._kind)
            if answer.outcome != "answered":
                raise SystemFailed(f"before the load, a request ended as: {answer.outcome}")
            self._right[adapter] = answer.text

    async def capacity(self) -> float:
        """Requests/s with a fixed number of clients."""
        now = stopwatch()

        async def send(_request: Request, adapter: int | None, due_s: float, session: int, turn: int) -> Record:
            assert adapter is not None
            sent_s = now()
            answer = await self._known.ask(adapter, self._kind)
            if answer.outcome != "answered":
                raise SystemFailed(f"while the capacity was measured, a request ended as: {answer.outcome}")
            return Record(session, turn, due_s, sent_s, now())

        sessions = (self._session(number) for number in range(self._options.capacity_requests))
        return requests_per_s(await closed(send, sessions, self._options.clients, now))

    async def load(self, per_s: float, progress: Callable[[str], None]) -> None:
        self._began_at = time.monotonic()
        end_s = 60 * self._options.minutes
        loop = Loop(self._send, self._now_s, end_s)
        due = due_times("poisson", per_s, self._options.seed)
        beside = [
            asyncio.create_task(self._sample()),
            asyncio.create_task(self._write_now_and_then()),
            asyncio.create_task(self._kill_now_and_then(loop, end_s, progress)),
        ]
        self._loop = loop
        try:
            await loop.open(zip(map(self._session, itertools.count()), due, strict=False))
            for task in beside:
                if task.done():
                    task.result()  # raises what ended it, such as that nothing was left to kill
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def _session(self, number: int) -> Session:
        """One request for an adapter that is drawn; the cluster's client makes its body."""
        return Session(number, self._an_adapter(), (Request("", {}, self._options.generated_tokens),))

    async def _send(self, _request: Request, adapter: int | None, due_s: float, session: int, turn: int) -> Record:
        """One client. Its latency counts from when it should have been sent."""
        assert adapter is not None
        sent_s = self._now_s()
        if self._loop.num_in_flight > _MAX_IN_FLIGHT:
            outcome = "not sent: too many in flight"
        else:
            outcome = await self._outcome(adapter)
        ended_s = self._now_s()
        self._answers.append(Answer(due_s, ended_s - due_s, outcome))
        return Record(session, turn, due_s, sent_s, ended_s)

    async def _outcome(self, adapter: int) -> str:
        patience_s = self._random.uniform(0, 1) if self._random.random() < self._options.aborted else None
        try:
            async with asyncio.timeout(patience_s):
                answer = await self._known.ask(adapter, self._kind)
        except TimeoutError:
            return LEFT
        is_wrong = answer.outcome == "answered" and answer.text != self._right[adapter]
        return "wrong answer" if is_wrong else answer.outcome

    async def _kill_now_and_then(self, loop: Loop, end_s: float, progress: Callable[[str], None]) -> None:
        every_s = self._options.kill_every_s
        for at_s in itertools.takewhile(lambda each: each < end_s - BACK_WITHIN_S, itertools.count(every_s, every_s)):
            await asyncio.sleep(max(0.0, at_s - self._now_s()))
            try:
                self._kill()
            except SystemFailed:
                loop.stop()
                raise
            progress(f"  {self._now_s():.0f} s: killed {self._kills[-1].victim}; {loop.num_in_flight} in flight")

    def _kill(self) -> None:
        workers = [(worker, part) for worker in LAYOUTS[self._options.layout] for part in _PARTS]
        for worker, part in self._random.sample([("", "router"), *workers], len(workers) + 1):
            with contextlib.suppress(SystemFailed, psutil.Error):
                self._known.process(worker, part).kill()
                self._kills.append(Kill(self._now_s(), f"{worker} {part}".strip()))
                return
        raise SystemFailed("there is no process left to kill")

    async def _sample(self) -> None:
        while True:
            now_s = self._now_s()
            for name, use in (await asyncio.to_thread(self._known.uses)).items():
                self._samples.append(Sample(now_s, name, use.mib, use.descriptors, use.pid))
            await asyncio.sleep(_SAMPLE_EVERY_S)

    async def _write_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            now_s = self._now_s()
            with contextlib.suppress(SystemFailed):  # nothing was answered yet
                # In a thread: it goes through all answers, and the clients' clock must not stand still.
                found = await asyncio.to_thread(summary, [*self._answers], [*self._kills], [*self._samples])
                self._write({**found, "ended": f"early: after {now_s:.0f} s of the load"})

    def _an_adapter(self) -> int:
        return self._random.choices(range(self._options.adapters), self._weights)[0]

    def _now_s(self) -> float:
        return time.monotonic() - self._began_at

    def summary(self) -> dict[str, Any]:
        return summary(self._answers, self._kills, self._samples)


# ---- what is reported -----------------------------------------------------------------------------------------------


def summary(answers: list[Answer], kills: list[Kill], samples: list[Sample]) -> dict[str, Any]:
    """Outcomes, the p99 before and after each kill, and what memory and descriptors did."""
    answered = [each for each in answers if each.outcome == "answered"]
    first_kill_s = kills[0].at_s if kills else float("inf")
    before = [each.seconds for each in answered if each.began_s < first_kill_s - 1]
    if not before:
        raise SystemFailed("no request was answered before the first kill; let the load last longer")
    normal_s = quantile(before, 0.99)
    end_s = max(each.began_s for each in answers)
    nexts = [*(each.at_s for each in kills[1:]), end_s]
    return {
        "outcomes": dict(Counter(each.outcome for each in answers)),
        "wrong_answers": sum(each.outcome == "wrong answer" for each in answers),
        "hung": sum(each.outcome == "hung" for each in answers),
        "p99_before_s": round(normal_s, 3),
        "kills": [_after(kill, until_s, answers, normal_s) for kill, until_s in zip(kills, nexts, strict=False)],
        "processes": _growth(samples),
    }


def _after(kill: Kill, until_s: float, answers: list[Answer], normal_s: float) -> dict[str, Any]:
    """What clients saw from one kill to the next, those included who were being answered."""
    during = [
        each
        for each in answers
        if each.began_s + each.seconds >= kill.at_s and each.began_s < until_s and each.outcome != LEFT
    ]
    # Those whom the next kill hit do not count here.
    later = [
        each
        for each in during
        if each.began_s >= kill.at_s + BACK_WITHIN_S
        and (each.outcome == "answered" or each.began_s + each.seconds < until_s)
    ]
    p99_s = quantile([each.seconds for each in later], 0.99) if later else None
    bad = [each for each in during if each.outcome != "answered" or each.seconds > SLOW * normal_s]
    return {
        "at_s": round(kill.at_s, 1),
        "victim": kill.victim,
        "failed": dict(Counter(each.outcome for each in during if each.outcome != "answered")),
        "last_slow_or_failed_s": round(
            max((each.began_s - kill.at_s for each in bad if each.began_s > kill.at_s), default=0.0), 1
        ),
        "p99_after_30_s": None if p99_s is None else round(p99_s, 3),
        "is_back": None
        if p99_s is None
        else p99_s <= SLOW * normal_s and all(each.outcome == "answered" for each in later),
    }


def _growth(samples: list[Sample]) -> dict[str, Any]:
    """By process: medians of the first and the last quarter of the run, and growth within its longest life.

    A kill begins a new life, so the run's quarters may compare two of them.
    """
    found = {}
    end_s = max((each.at_s for each in samples), default=0.0)
    for name in sorted({each.of for each in samples}):
        own = [each for each in samples if each.of == name]
        first = [each for each in own if each.at_s <= end_s / 4]
        last = [each for each in own if each.at_s >= end_s * 3 / 4]
        if first and last:
            found[name] = {
                "mib": [round(statistics.median(each.mib for each in part), 1) for part in (first, last)],
                "max_mib": round(max(each.mib for each in own), 1),
                "descriptors": [statistics.median(each.descriptors for each in part) for part in (first, last)],
                "max_descriptors": max(each.descriptors for each in own),
                "longest_life": _longest_life(own),
            }
    return found


def _longest_life(samples: list[Sample]) -> dict[str, Any]:
    """Its seconds, and medians of its first and its last quarter. The time in which it fills its caches is left out."""
    lives: dict[int, list[Sample]] = {}
    for each in samples:
        lives.setdefault(each.pid, []).append(each)
    longest = max(lives.values(), key=lambda life: life[-1].at_s - life[0].at_s)
    seconds = longest[-1].at_s - longest[0].at_s
    old = [each for each in longest if each.at_s >= longest[0].at_s + min(_YOUNG_S, seconds / 4)]
    quarters = old[: max(1, len(old) // 4)], old[-max(1, len(old) // 4) :]
    return {
        "seconds": round(seconds),
        "mib": [round(statistics.median(each.mib for each in part), 1) for part in quarters],
        "descriptors": [statistics.median(each.descriptors for each in part) for part in quarters],
    }


def table(document: dict[str, Any]) -> str:
    """The kills, then the processes."""
    lines = [f"outcomes: {document['outcomes']}; p99 before the first kill {document['p99_before_s']:.3f} s"]
    lines.append(f"{'killed':<28}{'at':>8}{'p99 after 30 s':>16}{'back':>7}  failed")
    for kill in document["kills"]:
        p99 = "-" if kill["p99_after_30_s"] is None else f"{kill['p99_after_30_s']:.3f} s"
        lines.append(f"{kill['victim']:<28}{kill['at_s']:>6.0f} s{p99:>16}{kill['is_back']!s:>7}  {kill['failed']}")
    lines.append(f"{'process':<28}{'MiB first, last':>22}{'max':>9}{'descriptors':>18}{'max':>6}  longest life")
    for name, use in document["processes"].items():
        mib, descriptors = (f"{first:g}, {last:g}" for first, last in (use["mib"], use["descriptors"]))
        life = use["longest_life"]
        lines.append(
            f"{name:<28}{mib:>22}{use['max_mib']:>9.0f}{descriptors:>18}{use['max_descriptors']:>6}  "
            f"{life['seconds']} s, MiB {life['mib']}, descriptors {life['descriptors']}"
        )
    lines.append(f"left behind: {document['left_behind'] or 'nothing'}")
    return "\n".join(lines)
