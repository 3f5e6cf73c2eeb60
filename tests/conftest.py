"""What holds for every test: how tests are spread over processes, and what each process has of its own."""

import contextlib
import fcntl
import functools
import gc
import inspect
import multiprocessing.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from process.lifetime import import_grpc_without_fork_handlers

import_grpc_without_fork_handlers()  # as in production: tests start programs under uvloop

ROOT = Path(__file__).parent

UNIT_TIMEOUT_S = 240  # a test that hangs must not use up the time of the whole run
LONG_TIMEOUT_S = 3600  # hundreds of kills on a machine that is a fifth as fast as it may be
# Tests of these start clusters of their own, and use the shared one never.
OWN_CLUSTERS = tuple(
    f"tests/cluster/{each}"
    for each in (
        "adapters/", "answers/test_mixed_cluster.py", "answers/test_other_models.py", "answers/test_pair_bfloat16.py",
        "answers/test_role_changes.py", "answers/test_tensor_parallel.py", "answers/test_unified_worker.py", "tenants/",
        "api/test_usage.py", "faults/test_long_prompts.py", "faults/test_rolling_restart.py", "installed/test_up.py",
    )
)  # fmt: skip
# Programs that share one import of SGLang.
FORKED_PROGRAMS = tuple(f"tests/engine/test_{each}.py" for each in ("access", "hooks", "prefix_cache_probing"))
MOST_WITH_ENGINES = 2  # processes
LONGEST_UNIT_TESTS = ("router", "training")
LONGEST_FAILURE = 4000  # characters printed of a failure when it happens: the end, with the error
_LATE = pytest.StashKey[str]()  # why a test that has waited for too long fails

# Examples have no deadline, as a machine may stand still for seconds; those of one test share its fixtures, knowingly.
settings.register_profile(
    "prelude", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("prelude")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process that runs the tests.

    Tests send Ctrl-C to what they start; a shell's `&` starts us with it ignored, which children would inherit.
    Tests also look for files that were left behind, so each of several processes has its own temporary folder. Their
    models are so small that more threads than one, here and in what they start, would only wait for each other.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        folder = tempfile.mkdtemp(prefix="pt")  # short: engines have sockets in it, whose paths are bounded
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        # At exit, after multiprocessing has removed its own folder in there.
        multiprocessing.util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-1000)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all tests without the garbage collector, which takes a quarter of that time: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own: uvloop as in production, or the module's `LOOP`.

    A fixture that is an asynchronous context is entered there; the test gets its value.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    getattr(pyfuncitem.module, "LOOP", uvloop).run(run())
    return True


class _Scheduling(LoadScopeScheduling):
    """Tests go to processes by file, those of the shared cluster together. Two processes run engines, as long as there
    are such tests, and the others fill the time that engines spend waiting.

    pytest-xdist's own `--dist loadgroup` has no effect with pytest 9.2: it writes node ids that pytest does not read.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.startswith("tests/cluster/") and not path.startswith(OWN_CLUSTERS):
            return "engines of the shared cluster"
        if path.startswith(FORKED_PROGRAMS):
            return "engines' programs"
        return f"engines of {path}" if path.startswith(("tests/cluster/", "tests/engine/")) else path

    def _assign_work_unit(self, node: Any) -> None:
        """The next file that this process may run; it idles if there is none."""
        may_run_engines = node in self.nodes[:MOST_WITH_ENGINES]
        scopes = (scope for scope in self.workqueue if may_run_engines or not scope.startswith("engines"))
        if (scope := next(scopes, None)) is not None:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    return _Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest first: the tests with clusters of their own, then single engines, the shared cluster, all others.

    The tests that kill processes of the shared cluster come last of those that need it.
    """

    def turn(item: pytest.Item) -> int:
        if item.path.is_relative_to(ROOT / "cluster"):
            if item.get_closest_marker("kills_the_cluster"):
                return 4
            return 3 if "cluster" in getattr(item, "fixturenames", ()) else 1
        if item.path.is_relative_to(ROOT / "engine"):
            return 2
        return 5 if any(item.path.is_relative_to(ROOT / "unit" / each) for each in LONGEST_UNIT_TESTS) else 6

    items.sort(key=turn)
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        elif item.path.is_relative_to(ROOT / "unit"):
            item.add_marker(pytest.mark.timeout(UNIT_TIMEOUT_S))


class _FailuresAtOnce:
    """Prints each failure when it happens: a run that is ended from outside never gets to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")  # not yet there when pytest is configured
        if not report.failed or terminal is None:
            return
        terminal.ensure_newline()
        terminal.write_line(f"FAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)")
        terminal.write_line(report.longreprtext[-LONGEST_FAILURE:])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Restore the signal handlers that a test has replaced: an agent that stops leaves Ctrl-C deadly."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return (yield)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` waits for those of other processes and keeps them waiting; all others run side by side.

    A test that has waited for longer than the others may take fails, and names them.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    deadline = time.monotonic() + int(item.config.workerinput["workercount"]) * _longest_s(item.session)
    # Locks need a file that every process finds, whatever is in it.
    with Path(__file__).open() as entrance, (ROOT.parent / "pyproject.toml").open() as running:
        try:
            _lock(entrance, fcntl.LOCK_EX, deadline)  # held while waiting to be alone, so that nobody overtakes
            _lock(running, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH, deadline)
        except TimeoutError as late:
            item.stash[_LATE] = str(late)
        fcntl.flock(entrance, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(running, fcntl.LOCK_UN)  # a forked child may still have the file open


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if (late := item.stash.get(_LATE, None)) is not None:
        pytest.fail(late, pytrace=False)


@functools.cache
def _longest_s(session: pytest.Session) -> float:
    """The longest that a test of this run may take."""
    markers = (item.get_closest_marker("timeout") for item in session.items)
    return max([float(session.config.getini("timeout")), *(marker.args[0] for marker in markers if marker)])


def _lock(file: IO[str], kind: int, deadline: float) -> None:
    """Raises TimeoutError with the tests of the processes that have the lock."""
    while True:
        try:
            return fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"other tests do not end: {'; '.join(_holders(file))}") from None
        time.sleep(0.02)


def _holders(file: IO[str]) -> Iterator[str]:
    """Process and command line, which pytest-xdist sets to the test, of each that has a lock on the file."""
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[-3].endswith(f":{os.fstat(file.fileno()).st_ino}"):
            with contextlib.suppress(OSError):
                yield f"{words[-4]} {Path(f'/proc/{words[-4]}/cmdline').read_text().replace(chr(0), ' ')}"
