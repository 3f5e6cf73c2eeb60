"""Programs that import SGLang, in a process of their own: its imports change much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def printed_by(program: str, *words: str, **environment: str) -> tuple[Any, str]:
    """What the program prints last, as JSON, and what it writes to standard error."""
    command, env = [sys.executable, "-c", program, *words], os.environ | environment
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
