"""What transformers and peft answer, computed in clean processes that know nothing of SGLang."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

# Imports take seconds, answers less. So one process imports and computes nothing; for each call it forks one that does.
_FORK_SERVER = """
import json, os, sys, traceback
import peft
import transformers.models.qwen2.modeling_qwen2
from pathlib import Path
from support.adapters.reference_answers import answer_requests

for line in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            model, asked, answered = json.loads(line)
            answer_requests(model, Path(asked), Path(answered))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def run_reference(model_dir: Path, requests: list[dict], folder: Path) -> list[dict]:
    """Answers of transformers and peft, computed in a clean process that knows nothing of SGLang."""
    asked, answered = folder / "requests.json", folder / "answers.json"
    asked.write_text(json.dumps(requests, default=str))
    arguments = [str(model_dir), str(asked), str(answered)]
    server = _fork_server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(arguments), file=server.stdin, flush=True)
    status = server.stdout.readline()
    assert status == "0\n", f"the reference ended with {status.strip() or server.poll()}: {' '.join(arguments)}"
    return json.loads(answered.read_text())


@functools.cache
def _fork_server() -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "PRELUDE"))}
    clean["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    clean["OMP_NUM_THREADS"] = "2"  # more only wait for each other where the model is this small
    command = [sys.executable, "-c", _FORK_SERVER]
    server = subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server
