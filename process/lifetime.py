"""Lifetimes of processes and tasks: none outlives what started it."""

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any

from process.exhaustion import is_exhaustion

_GRPC_FORKS = "GRPC_ENABLE_FORK_SUPPORT"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens. Linux only."""
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent died before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError as error:
        if not is_exhaustion(error):
            raise
        with contextlib.suppress(ProcessLookupError):  # without a descriptor, a zombie looks alive for now
            os.kill(pid, 0)
            return True
        return False


def how_ended(code: int) -> str:
    """How a process ended, by its exit code: "with code 3", or "by SIGKILL", as where memory is short."""
    if code >= 0:
        return f"with code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"by signal {-code}"


def kill_group(group: int, number: signal.Signals) -> None:
    """Signal every process of a group; does nothing if the group is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


async def end_processes(
    processes: Iterable[asyncio.subprocess.Process], grace_s: float, kill: Callable[[asyncio.subprocess.Process], None]
) -> None:
    """Send SIGTERM to those that run, and `kill` what is left after the grace period. Returns when all have ended."""
    running = [process for process in processes if process.returncode is None]
    if not running:
        return
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    ends = [asyncio.create_task(process.wait()) for process in running]
    await asyncio.wait(ends, timeout=grace_s)
    for process in running:
        if process.returncode is None:
            kill(process)
    await asyncio.wait(ends)


@contextlib.asynccontextmanager
async def meanwhile(
    *works: Coroutine[Any, Any, Any], then: Callable[[], Awaitable[Any]] | None = None
) -> AsyncIterator[None]:
    """Run them as tasks during the block. They have ended after it, however; `then` comes last."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if then is not None:
            await then()


@contextlib.contextmanager
def ctrl_c_ends_process() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, until `stop_signal` takes over. For code with nothing to clean up.

    A KeyboardInterrupt could be lost: imports may swallow one that is raised inside them.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or another handler
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stop_signal() -> asyncio.Future[signal.Signals]:
    """A future that the next SIGTERM or SIGINT completes. The one after it ends the process as usual."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Future[signal.Signals] = loop.create_future()

    def stop(number: signal.Signals) -> None:
        if not arrived.done():
            arrived.set_result(number)
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return arrived


def import_grpc_without_fork_handlers() -> None:
    """Import gRPC so that this process can start others safely. It has no effect where gRPC has been imported before.

    uvloop starts a process by a real fork. gRPC's handlers then start its threads anew in the child, and these can
    crash it before it becomes the other program: on two cores about one in fifteen (gRPC 1.85).
    """
    own = os.environ.get(_GRPC_FORKS)
    os.environ[_GRPC_FORKS] = "0"
    try:
        import grpc  # noqa: F401 - it reads the variable now
    finally:  # children read their own: an engine on a CPU forks, and may trace through gRPC
        if own is None:
            del os.environ[_GRPC_FORKS]
        else:
            os.environ[_GRPC_FORKS] = own
