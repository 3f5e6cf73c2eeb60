"""Programs that import SGLang, in a process of their own: its imports change much."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The imports take ten seconds of a processor. So one process does them, and forks one for each program.
_FORK_SERVER = """
import json, os, sys, traceback
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from engine import cpu_support
cpu_support.install()
import sglang.srt.entrypoints.http_server

def run(source, name, words, environment, folder):
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, stream), os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [name, *words], os.path.dirname(name)
    try:
        exec(compile(source, name, "exec"), {"__name__": "__main__", "__file__": name})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end, file=sys.stderr)
        return 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies, flush=True)
"""


def run(program: str | Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script, or the text of one, as if by `python`, where SGLang is imported already."""
    source, name = (program.read_text(), str(program)) if isinstance(program, Path) else (program, "")
    server = _fork_server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        try:
            asked = [source, name, words, {**os.environ, **environment}, folder]
            print(json.dumps(asked), file=server.stdin, flush=True)
            code = int(server.stdout.readline())
        except BaseException:  # a test that was ended: its program may go on
            server.kill()
            _fork_server.cache_clear()
            raise
        printed, errors = (Path(folder, stream).read_text() for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess([name, *words], code, printed, errors)


def printed_by(program: str | Path, *words: str, **environment: str) -> tuple[Any, str]:
    """What the program prints last, as JSON, and what it writes to standard error."""
    done = run(program, *words, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FORK_SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server
