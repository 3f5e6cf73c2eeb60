"""Detects whether an engine hangs, by the progress of its parts.

A part is *silent* while it makes no progress, and *still* while its thread also uses no processor time. A scheduler is
*stuck* while it uses processor time, but finishes no iteration of its loop, and no compiler runs for it. Before the
engine is warm, a scheduler may compile in its own thread, so it is never stuck then.

A stalled or overloaded machine is no hang. Time counts only while this process was scheduled and while the part was not
waiting for a processor. For a part that uses processor time, that time counts, but at least a quarter of the elapsed
time.

| part | suspected after | hung after |
|---|---|---|
| scheduler, still | `hang_timeout_s` | twice that |
| scheduler, stuck, once it is warm | `Timeouts.compute_s` | four times that |
| scheduler that computes one long batch | `Timeouts.batch_s` | the same |
| HTTP server, detokenizer, KV thread | `hang_timeout_s` silent | twice that if still, four times if it computes |

A suspected engine gets no requests until it shows progress. A hung one is restarted.

The KV thread is the one that takes decode engines' messages. The threads that write KV are not watched: one that waits
for a peer that has stopped looks like one that is stuck, and is no reason to restart this engine.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # SGLang needs it, too

from engine.hooks.hook import can_be
from engine.vital_signs import read_vitals
from process.exhaustion import is_exhaustion

OBSERVE_S = 1.0  # between two observations
_MAX_COUNTED_S = 1.5 * OBSERVE_S  # of the time since the last observation: what is above it, this process was not run
TICK_S = 0.01
_LEAST_COUNTED = 0.25  # of the time in which a part computes now and then
_LEAST_COMPILED = 0.1  # of a processor, for what a scheduler's child processes do to count as its compiler
_STILL_FACTOR, _COMPUTING_FACTOR = 2, 4
_LOOK_FOR_CHILDREN_AFTER = 2  # observations without progress: listing processes takes milliseconds
SERVER = "HTTP server"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """See the table above."""

    hang_s: float
    batch_s: float
    compute_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Processor:
    """A thread's use of the processor, in ticks of 10 ms."""

    ticks: int
    child_ticks: int = 0  # of the processes that its process has started
    is_runnable: bool = False  # it runs or waits for a processor
    is_stopped: bool = False  # by a signal or a debugger


@dataclass(frozen=True, slots=True)
class PartState:
    """One observation of a part. A change of any counter is progress."""

    progress: int
    processor: Processor | None  # of its thread; None: unknown
    is_asked: bool = True  # silence means something


@dataclass(slots=True)
class _Clock:
    last: PartState
    silent_s: float = 0.0
    still_s: float = 0.0
    stuck_s: float = 0.0


class HangWatch:
    """Judges observations. A pure function of them, of `is_warm` and of time."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._clocks: dict[str, _Clock] = {}
        self._observed_at: float | None = None
        self.suspicion = ""  # why no request should go there, in words; empty: nothing is wrong
        self.is_hung = False
        self.is_warm = True  # the engine has answered requests: what its schedulers compile for the first ones is there
        self.num_signs = 0  # of a scheduler that computes, without progress yet

    def observe(self, now_s: float, parts: Mapping[str, PartState]) -> None:
        """Add an observation of all parts."""
        passed_s = 0.0 if self._observed_at is None else min(now_s - self._observed_at, _MAX_COUNTED_S)
        self._observed_at = now_s
        self.suspicion, self.is_hung = "", False
        for name, state in parts.items():
            clock = self._clocks.setdefault(name, _Clock(state))
            last, clock.last = clock.last, state
            if state.progress != last.progress or not state.is_asked:
                clock.silent_s = clock.still_s = clock.stuck_s = 0.0
            elif state.processor is None or last.processor is None:
                clock.silent_s, clock.still_s = clock.silent_s + passed_s, 0.0
            elif (computed_s := _computed_s(last.processor, state.processor)) > 0:
                counted_s = min(passed_s, max(computed_s, _LEAST_COUNTED * passed_s))
                clock.silent_s, clock.still_s = clock.silent_s + counted_s, 0.0
                compiled_s = (state.processor.child_ticks - last.processor.child_ticks) * TICK_S
                if self.is_warm and compiled_s < _LEAST_COMPILED * passed_s:
                    clock.stuck_s += counted_s
                self.num_signs += name.startswith("scheduler")
            elif not state.processor.is_runnable:
                clock.silent_s, clock.still_s = clock.silent_s + passed_s, clock.still_s + passed_s
            self._judge(name, clock)

    def _judge(self, name: str, clock: _Clock) -> None:
        hang_s, batch_s = self._timeouts.hang_s, self._timeouts.batch_s
        if name.startswith("scheduler"):
            compute_s = self._timeouts.compute_s
            is_long = clock.silent_s >= batch_s
            is_suspected = clock.still_s >= hang_s or clock.stuck_s >= compute_s or is_long
            is_hung = (
                clock.still_s >= _STILL_FACTOR * hang_s or clock.stuck_s >= _COMPUTING_FACTOR * compute_s or is_long
            )
        else:
            is_suspected = clock.silent_s >= hang_s
            is_hung = clock.still_s >= _STILL_FACTOR * hang_s or clock.silent_s >= _COMPUTING_FACTOR * hang_s
        self.is_hung |= is_hung
        if is_suspected and not self.suspicion:
            computes = ", though it computes" if clock.still_s < clock.silent_s and clock.still_s < hang_s else ""
            self.suspicion = f"the engine's {name} has shown no progress for {clock.silent_s:.0f} s{computes}"


def _computed_s(last: Processor, now: Processor) -> float:
    """The processor time of a thread and of the processes that its process has started, between two observations."""
    return (now.ticks + now.child_ticks - last.ticks - last.child_ticks) * TICK_S


def parts_of(role: str, ranks: Sequence[int]) -> tuple[str, ...]:
    """The parts of an engine with these ranks that have vital signs. Stock engines have none."""
    if role == "stock":
        return ()
    kv = [f"kv-{rank}" for rank in ranks] if can_be(role, {"prefill"}) else []
    return (*(f"scheduler-{rank}" for rank in ranks), "detokenizer", *kv)


class EngineProbe:
    """Observes one engine for a HangWatch."""

    def __init__(
        self,
        folder: Path,
        parts: Iterable[str],
        server_pid: int,
        num_answers: Callable[[], int],
    ) -> None:
        self._folder = folder
        self._parts = tuple(parts)
        self._server_pid = server_pid
        self._detokenizer_pid = _descendant(server_pid, "sglang::detokenizer")
        self._num_answers = num_answers  # of its HTTP server, which the agent asks at least every second
        self._num_signs: dict[str, tuple[int, int]] = {}  # by scheduler: its last count, and how often in a row
        self.num_batches = 0  # that its schedulers have begun

    def observe(self) -> dict[str, PartState]:
        """The state of all parts now."""
        states = {SERVER: PartState(self._num_answers(), processor_of(self._server_pid))}
        num_batches = 0
        for part in self._parts:
            reading = read_vitals(self._folder, part)
            num_batches += reading.num_batches
            if part.startswith("scheduler"):
                last, times = self._num_signs.get(part, (-1, 0))
                times = times + 1 if reading.num_signs == last else 0
                self._num_signs[part] = reading.num_signs, times
                is_silent = times > _LOOK_FOR_CHILDREN_AFTER
                processor = processor_of(reading.pid, with_children=is_silent)
                states[part] = PartState(reading.num_signs, processor)
            elif reading.num_signs:
                processor = processor_of(reading.pid) if part == "detokenizer" else None
                states[part] = PartState(reading.num_signs, processor, is_asked=reading.owes_answer)
            elif part == "detokenizer" and (processor := processor_of(self._detokenizer_pid)) is not None:
                # A spawned one, as on GPUs: SGLang loads no plugin there, so it cannot answer.
                states[part] = PartState(0, processor, is_asked=processor.is_stopped)
        self.num_batches = num_batches
        return states


def _descendant(pid: int, word: str) -> int:
    """The process that a process has started and whose command line has the word; 0: there is none."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(child.cmdline()):
                    return child.pid
    return 0


def processor_of(pid: int, *, with_children: bool = False) -> Processor | None:
    """The processor use of a process's main thread; None if it cannot be read. Raises OSError without descriptors.

    `with_children`: includes processes that it has started, which may compile kernels for it. Its other threads do not
    count, because an engine's threads for KV transfers are always busy.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        ticks = int(fields[11]) + int(fields[12])  # utime, stime
    except (OSError, IndexError, ValueError) as error:
        if is_exhaustion(error):
            raise
        return None
    child_ticks = 0
    if with_children:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                times = child.cpu_times()
                child_ticks += int((times.user + times.system) / TICK_S)
    return Processor(ticks, child_ticks, is_runnable=fields[0] == "R", is_stopped=fields[0] in "Tt")
