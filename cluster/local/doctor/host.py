"""The host that probes examine: files below a root, and the output of programs."""

import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_MAX_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Host:
    """`root` is / but for tests, which have /proc and /sys of another host below it."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """A file's text; empty if it cannot be read."""
        try:
            with self.path(name).open(errors="replace") as file:
                return file.read(_MAX_READ).strip()
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """The names in a folder; none if it does not exist."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def run(self, *command: str, timeout_s: float) -> tuple[int | None, str]:
        """Exit status and output of a program; None: there is no such program, or it did not end."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=dict(self.environment),
                start_new_session=True,
            )
        except OSError as failure:
            return None, f"{command[0]}: {failure.strerror}"
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # and do not wait: a process that waits for its driver may not end
            return None, f"{command[0]} did not end within {timeout_s:g} s"
        return process.returncode, output
