"""Programs of their own processes whose imports take seconds: one process imports, and forks one for each program."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

_SERVER = """
import gc, json, os, sys, traceback
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
gc.disable()  # it would take a quarter of the imports' time
{imports}
gc.freeze()
gc.enable()

def run(source, name, words, environment, folder):
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, stream), os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [name, *words], os.path.dirname(name)
    try:
        exec(compile(source, name, "exec"), {{"__name__": "__main__", "__file__": name}})
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
    print(pid, file=replies, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=replies, flush=True)
"""


class ForkServer:
    """Runs one program at a time where `imports` are done already, in this environment."""

    def __init__(self, imports: str, environment: Mapping[str, str]) -> None:
        self._imports, self._environment = imports, environment

    @cached_property
    def _server(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _SERVER.format(imports=self._imports)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen(command, env=dict(self._environment), **pipes)
        atexit.register(server.kill)
        return server

    def start(self, program: str | Path, *words: str, folder: str, **environment: str) -> int:
        """The pid of a script, or of the text of one, that runs as if by `python`; its output goes to the folder."""
        source, name = (program.read_text(), str(program)) if isinstance(program, Path) else (program, "")
        asked = [source, name, words, {**self._environment, **environment}, folder]
        print(json.dumps(asked), file=self._server.stdin, flush=True)
        return int(self._server.stdout.readline())  # type: ignore[union-attr]

    def wait(self) -> int:
        """The exit status of the program."""
        return int(self._server.stdout.readline())  # type: ignore[union-attr]

    def run(self, program: str | Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                self.start(program, *words, folder=folder, **environment)
                code = self.wait()
            except BaseException:  # a test that was ended: its program may go on
                self._server.kill()
                del self._server
                raise
            printed, errors = (Path(folder, stream).read_text() for stream in ("stdout", "stderr"))
        return subprocess.CompletedProcess([str(program), *words], code, printed, errors)

    def printed_by(self, program: str | Path, *words: str) -> Any:
        """What the program prints last, as JSON."""
        done = self.run(program, *words)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


SGLANG = ForkServer(
    "from engine import cpu_support\ncpu_support.install()\nimport sglang.srt.entrypoints.http_server", os.environ
)
