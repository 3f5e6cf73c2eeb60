"""Keeps one SGLang server running: start, hook verification, watch, restart with back-off, stop.

An engine is restarted when one of its processes has ended, or one of its parts hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from engine.arguments import EngineSpec, command, environment
from engine.errors import EngineError, EngineRefused, EngineUnreachable
from engine.hang_watch import OBSERVE_S, EngineProbe, HangWatch, Timeouts, parts_of
from engine.hooks.hook import SWITCHING
from engine.hooks.ledger import hooks_for
from engine.hooks.report import ProcessReport, read_reports
from engine.output import EngineOutput, reason_in
from process.exhaustion import is_exhaustion
from process.lifetime import how_ended, is_alive, kill_group
from process.log import Stopwatch
from process.mapped_files import descendants, mapped_among

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CHANGE_S = 30.0  # for each call that changes an engine's role
_LOOK_S = 1.0  # between two looks at what an engine that starts has mapped
_STOP_GRACE_S = 5.0
_OUTPUT_S = 2.0  # for the output of an engine that has ended
_BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
# Shared memory of its own that an engine leaves: reports of load, of which SGLang removes none, and, when it is killed,
# the message queue of its tensor-parallel ranks, of megabytes, and Python's semaphores, of which joblib changes the
# names. Others map what UCX shares, so that is not among it.
_LEFT_BEHIND = ("sglang_loads_*", "sgl_shm_mq_*", "sem.mp-*", "sem.loky-*")
_MOST_SAME_FAILURES = 3  # starts in a row
_VARYING = re.compile(r"0x[0-9a-f]+|\d+")  # addresses, pids, ports, times
_STABLE_S = 60.0  # an engine that ran this long resets the back-off


class EngineStatus(StrEnum):
    """An engine's state."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's current state. `incarnation` is new at each start, and empty unless the engine is up.

    `suspicion` says why an engine that is up should get no requests: a part of it shows no sign of life.
    """

    status: EngineStatus
    incarnation: str
    reports: tuple[ProcessReport, ...]
    num_restarts: int
    reason: str
    suspicion: str = ""


class EngineStartFailed(EngineError):
    """The engine exited, did not respond or lacks hooks."""


class EngineGivenUp(EngineError):
    """The engine has never been up, and its starts fail in the same way."""


class StartFailures:
    """Counts starts that fail in the same way, until one succeeds: then what fails later may pass by itself."""

    def __init__(self) -> None:
        self._last = ""
        self._num_same = 0
        self._has_been_up = False

    def succeeded(self) -> None:
        self._has_been_up = True

    def is_enough(self, reason: str) -> bool:
        """Note a failure: whether to start no more."""
        same = _VARYING.sub("", reason)
        self._num_same = self._num_same + 1 if same == self._last else 1
        self._last = same
        return not self._has_been_up and self._num_same >= _MOST_SAME_FAILURES


class EngineSupervisor:
    """Owns one engine's processes. Calls `on_change` in the event loop at every state change.

    Without `hang_timeouts` nothing looks for hangs. With them, somebody must ask the engine's HTTP server at least once
    a second; `num_answers` says how many answers came, `is_warm` whether an incarnation has answered requests.
    `check_files` runs in a thread before each start and again when the engine is up, and raises EngineError if what the
    engine reads is not what it should be: then the engine is ended, and started later.
    """

    def __init__(
        self,
        spec: EngineSpec,
        start_timeout_s: float,
        on_change: Callable[[EngineSnapshot], None],
        *,
        hang_timeouts: Timeouts | None = None,
        num_answers: Callable[[], int] = lambda: 0,
        is_warm: Callable[[str], bool] = lambda _incarnation: True,
        check_files: Callable[[], None] = lambda: None,
        role: str = "prefill",  # a switching engine's first
    ) -> None:
        self._spec = spec
        self._start_timeout_s = start_timeout_s
        self._on_change = on_change
        self._hang_timeouts = hang_timeouts
        self._num_answers = num_answers
        self._is_warm = is_warm
        self._check_files = check_files
        self._role = role  # of a switching engine: the one that it has or gets
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="check-files")  # of its own: a mount may hang for good
        self.progress = 0  # changes while the engine works on requests
        self._process: asyncio.subprocess.Process | None = None
        self._left_behind: set[Path] = set()
        self._last_lines: deque[str] = deque(maxlen=200)
        self._start_failures = StartFailures()
        self._output = EngineOutput()
        self._num_restarts = 0
        self.snapshot = EngineSnapshot(EngineStatus.STARTING, "", (), 0, "the engine is starting")

    def hand_over(self, to: EngineSupervisor) -> None:
        """Tell another supervisor's listeners from now on; the other one is not run."""
        self._on_change, self._num_answers, self._is_warm = to._on_change, to._num_answers, to._is_warm
        self._on_change(self.snapshot)

    async def change_role(self, role: str, watch: Stopwatch) -> None:
        """Give a switching engine without requests another role. One that does not take it is started again in it.

        It has a new incarnation then, as after any start. `watch` gets the parts of the change.
        """
        self._role = role
        if self.snapshot.status is not EngineStatus.UP:
            return  # it gets the role when it has started
        process = self._process
        assert process is not None
        try:
            async with contextlib.aclosing(self._spec.client(_CHANGE_S)) as client:
                for revision_id in await client.loaded_adapters():
                    await client.unload_adapter(revision_id, _CHANGE_S)
            watch.ended("adapters_unloaded_s")
            reports = await self._proven_in_role()
            watch.ended("engine_switched_s")
            # A part of the switch.
            watch.parts["kv_manager_ended_s"] = max(round(report.kv_end_s or 0.0, 3) for report in reports)
        except EngineError as error:
            log.error("engine keeps its role; starting it again", extra={"fields": {"reason": str(error)}})
            if self._process is process:  # else it has ended, which was seen meanwhile
                kill_group(process.pid, signal.SIGKILL)
        else:
            self._set(EngineStatus.UP, incarnation=uuid.uuid4().hex[:12], reports=reports)

    async def run(self) -> None:
        """Keep an engine up until cancelled; then stop it.

        Raises EngineGivenUp if three starts in a row fail in the same way and none has succeeded.
        """
        failures = 0
        try:
            while True:
                started_at = time.monotonic()
                try:
                    await self._run_once()
                except (EngineError, OSError) as error:  # as where there are no descriptors, or no room for a process
                    log.error("engine failed", extra={"fields": {"reason": str(error)}})
                    self._set(EngineStatus.DOWN, reason=str(error))
                    if isinstance(error, EngineStartFailed) and self._start_failures.is_enough(str(error)):
                        raise EngineGivenUp(str(error)) from error
                failures = 0 if time.monotonic() - started_at > _STABLE_S else failures + 1
                await self._kill()
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
                self._num_restarts += 1
        finally:
            stopping = asyncio.ensure_future(self._stop())
            try:
                await asyncio.shield(stopping)
            except asyncio.CancelledError:  # a second Ctrl-C, for example: the first one's stop takes seconds
                await stopping
                raise

    async def _run_once(self) -> None:
        """Run the engine once. Always ends with EngineError or cancellation."""
        self._set(EngineStatus.STARTING, reason="the engine is starting")
        await self._files_checked()
        await self._spawn()
        await self._wait_until_up()
        self._note_shared_memory()
        await self._files_checked()  # they may have changed while it read them
        reports = await self._proven_in_role()
        pids = [report.pid for report in reports]
        log.info("engine up", extra={"fields": {"pids": pids}})
        self._output.has_clients = True
        self._start_failures.succeeded()
        self._set(EngineStatus.UP, incarnation=uuid.uuid4().hex[:12], reports=reports)
        hangs = asyncio.create_task(self._look_for_hangs(), name="hang-watch")
        try:
            while all(is_alive(pid) for pid in pids):  # grandchildren: only /proc shows their end
                if hangs.done():
                    hangs.result()
                await asyncio.sleep(_POLL_S)
        finally:
            hangs.cancel()
        dead = [report.process for report in reports if not is_alive(report.pid)]
        raise EngineError(f"the engine's {', '.join(dead)} process ended; its worker's log has its last output")

    async def _files_checked(self) -> None:
        """Raises EngineError if the files are wrong, or not read within the time that an engine has to start."""
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await asyncio.get_running_loop().run_in_executor(self._checks, self._check_files)
        except TimeoutError:
            raise EngineError(f"the model's files could not be read within {self._start_timeout_s:g} s") from None

    async def _look_for_hangs(self) -> None:
        """Publish what is suspicious. Raises EngineError if the engine hangs."""
        if self._hang_timeouts is None:
            await asyncio.Event().wait()
            return
        assert self._process is not None
        watch = HangWatch(self._hang_timeouts)
        parts = parts_of(self._spec.role, range(self._spec.tensor_parallel))
        probe: EngineProbe | None = None

        def num_answers() -> int:
            return self._num_answers()  # another agent's, once the role has changed

        while True:
            try:
                probe = probe or EngineProbe(self._spec.report_dir, parts, self._process.pid, num_answers)
                states = probe.observe()
            except OSError as error:  # this process lacks descriptors: nothing can be said of the engine
                if not is_exhaustion(error):
                    raise
                await asyncio.sleep(OBSERVE_S)
                continue
            watch.is_warm = self._is_warm(self.snapshot.incarnation)
            watch.observe(time.monotonic(), states)
            self.progress = probe.num_batches + watch.num_signs
            if watch.is_hung:
                raise EngineError(f"{watch.suspicion}; it is started again")
            if bool(watch.suspicion) != bool(self.snapshot.suspicion):
                log.warning(
                    "engine suspected" if watch.suspicion else "engine is back",
                    extra={"fields": {"reason": watch.suspicion}},
                )
                self.snapshot = replace(self.snapshot, suspicion=watch.suspicion)
                self._on_change(self.snapshot)
            await asyncio.sleep(OBSERVE_S)

    async def _spawn(self) -> None:
        scratch = self._spec.scratch
        shutil.rmtree(scratch, ignore_errors=True)
        self._spec.report_dir.mkdir(parents=True)
        (scratch / "tmp").mkdir()
        self._last_lines.clear()
        self._output = EngineOutput()
        self._process = await asyncio.create_subprocess_exec(
            *command(self._spec),
            env=environment(self._spec, dict(os.environ)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            cwd=scratch,
            limit=1024 * 1024,
        )
        self._reader = asyncio.create_task(self._read_output(self._process), name="engine-output")

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        engine_log = logging.getLogger("sglang")
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # a line beyond the limit: its buffered part is dropped
                continue
            if not line:
                return
            text = self._output.shown(line.decode(errors="replace").rstrip())
            if text:
                self._last_lines.append(text[:4000])
                engine_log.info(text[:4000])

    async def _wait_until_up(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout_s
        looked_at = 0.0
        async with contextlib.aclosing(self._spec.client(5.0)) as client:
            while not await client.answers():
                if time.monotonic() - looked_at > _LOOK_S:
                    looked_at = time.monotonic()
                    self._note_shared_memory()
                if self._process.returncode is not None:
                    how = how_ended(self._process.returncode)
                    raise EngineStartFailed(f"the engine ended {how} at start: {self._last_output()}")
                if time.monotonic() > deadline:
                    raise EngineStartFailed(
                        f"the engine did not answer within {self._start_timeout_s:g} s, its start_timeout_s: "
                        f"{self._last_output()}"
                    )
                await asyncio.sleep(_POLL_S)
            try:
                await client.spare_garbage_collection()
            except (EngineRefused, EngineUnreachable) as error:  # it is right, and stops for a moment now and then
                log.warning("the engine collects its modules as garbage", extra={"fields": {"reason": str(error)}})
            if self._spec.role == SWITCHING:  # now, so that later changes capture no graphs
                await client.change_role("decode", self._start_timeout_s)

    async def _proven_in_role(self) -> tuple[ProcessReport, ...]:
        """As `_proven_reports`, once a switching engine has its role, which may become another one meanwhile."""
        deadline = time.monotonic() + (_CHANGE_S if self._spec.role == SWITCHING else 0.0)
        while True:
            try:
                if self._spec.role == SWITCHING:
                    async with contextlib.aclosing(self._spec.client(_CHANGE_S)) as client:
                        if not await client.change_role(self._role, _CHANGE_S):
                            raise EngineStartFailed("it has requests")
                return self._proven_reports()
            except EngineStartFailed:  # a peer may be warming it up, and the first rank may answer before others
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_POLL_S)

    def _proven_reports(self) -> tuple[ProcessReport, ...]:
        """The reports of the server and of each scheduler.

        Raises EngineStartFailed if one is missing, lacks hooks or holds adapters that it must not hold.
        """
        expected_hooks = {hook.name for hook in hooks_for(self._spec.role, self._spec.device)}
        expected = {"server", *(f"scheduler-{rank}" for rank in range(self._spec.tensor_parallel))}
        # The detokenizer reports as "server" too, and a process may have reported before it forked.
        reports = tuple(report for report in read_reports(self._spec.report_dir) if is_alive(report.pid))
        missing = expected - {report.process for report in reports}
        if missing:
            raise EngineStartFailed(f"no report of its hooks came from {', '.join(sorted(missing))}")
        for report in reports:
            lacking = expected_hooks - set(report.hooks)
            if lacking:
                raise EngineStartFailed(f"{report.process} lacks the hooks {', '.join(sorted(lacking))}")
            if self._spec.role == SWITCHING and report.role not in (None, self._role):
                raise EngineStartFailed(f"{report.process} has the role {report.role}, not {self._role}")
            if self._spec.adapters is None and (report.adapter_tensors or report.lora_enabled):
                raise EngineStartFailed(f"{report.process} holds {report.adapter_tensors} adapter tensors")
        return reports

    def _note_shared_memory(self) -> None:
        """Add to what is removed when the engine has ended; then nobody could say what it had mapped."""
        assert self._process is not None
        server = self._process.pid
        paths = (path for kind in _LEFT_BEHIND for path in Path("/dev/shm").glob(kind))
        self._left_behind |= mapped_among(paths, [server, *descendants(server)])

    async def _kill(self) -> None:
        """End every process of the engine's group, wait for the server, and remove the shared memory that it leaves."""
        if self._process is None:
            return
        kill_group(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        # A child that has left the group, as compilers' workers do, may outlive it and hold its output open.
        await asyncio.wait([self._reader], timeout=_OUTPUT_S)
        self._reader.cancel()
        self._process = None
        for path in self._left_behind:
            path.unlink(missing_ok=True)
        self._left_behind = set()

    async def _stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
            await self._kill()
        shutil.rmtree(self._spec.scratch, ignore_errors=True)
        self._set(EngineStatus.STOPPED, reason="the engine was stopped")

    def _set(
        self,
        status: EngineStatus,
        incarnation: str = "",
        reports: tuple[ProcessReport, ...] = (),
        reason: str = "",
    ) -> None:
        self.snapshot = EngineSnapshot(status, incarnation, reports, self._num_restarts, reason)
        self._on_change(self.snapshot)

    def _last_output(self) -> str:
        """For failures at start, before any client's text can be in it."""
        return reason_in(tuple(self._last_lines)) or "it said nothing"
