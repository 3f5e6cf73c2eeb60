"""Shared memory of killed engines is removed, that of others stays."""

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from cluster.local.shared_memory import mapped_below, remove_abandoned, segments

_KILLED = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import SemLock
if sys.argv[1:] == ["joblib"]:
    SemLock._make_name = staticmethod(lambda: f"/loky-{os.getpid()}-{id(SemLock):x}")  # what importing it does
lock, memory = multiprocessing.get_context("spawn").Lock(), SharedMemory(create=True, size=4096)
print(lock._semlock.name, memory.name, flush=True)
input()
"""


@pytest.mark.parametrize("imports", ["nothing", "joblib"])
def test_what_a_killed_process_has_left_goes(imports: str):
    before = segments()
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        semaphore, memory = process.stdout.readline().split()
        paths = {Path(f"/dev/shm/sem.{semaphore.lstrip('/')}"), Path("/dev/shm") / memory}
        assert paths <= segments() - before
        remove_abandoned(paths)
        assert all(path.exists() for path in paths)
        # Its resource tracker, which would remove them, is killed with it.
        os.killpg(process.pid, signal.SIGKILL)
    remove_abandoned(paths)
    assert not any(path.exists() for path in paths)
    remove_abandoned(paths)  # again: somebody was faster
    assert mapped_below(process.pid) == set()


_IN_A_CONTAINER = """
import mmap, os, signal, sys
from pathlib import Path
from cluster.local.shared_memory import mapped_below, remove_abandoned
foreign, own = map(Path, sys.argv[1:])
is_mapped, maps = os.pipe()
child = os.fork()
if child == 0:
    with own.open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    os.write(maps, b"yes")
    signal.pause()
os.read(is_mapped, 3)
assert mapped_below(os.getpid()) == {own}
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
remove_abandoned({foreign, own}, {own})
print(foreign.exists(), own.exists())
"""


def test_segments_of_processes_outside_of_a_container_stay():
    """With the host's /dev/shm and processes of its own, as `docker run --ipc host`."""
    memory = SharedMemory(create=True, size=4096)
    foreign, own = (f"/dev/shm/{memory.name}{end}" for end in ("", "-own"))
    container = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    try:
        done = subprocess.run(
            [*container, sys.executable, "-c", _IN_A_CONTAINER, foreign, own],
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        memory.close()
        memory.unlink()
    if "unshare: " in done.stderr:
        pytest.skip(f"no namespaces here: {done.stderr.strip()}")
    assert done.stdout == "True False\n", done.stderr
