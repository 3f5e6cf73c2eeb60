"""Programs that tests start: what they print goes to a file, and they end with the test."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def logged_process(
    words: Sequence[str | Path], log: Path, stop: signal.Signals = signal.SIGTERM, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """It has a minute to end after the signal. `options`: of Popen."""
    with log.open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, **options)
    try:
        yield process
    finally:
        process.send_signal(stop)  # nothing, once it has ended
        try:
            process.wait(60)
        finally:
            process.kill()
