"""The one log format: a JSON object per line, on standard error.

It waits for no reader: a full pipe would stop every event loop. What does not fit is dropped, and counted in a line.
Loggers take fields by `extra`: `log.info("adapter loaded", extra={"fields": {"revision": ..., "load_s": ...}})`.
Never log prompts, keys or headers.
"""

import fcntl
import logging
import os
import select
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

_STDERR = 2
_PIPE_BYTES = 2**20  # the most that an unprivileged process gets: seconds of a busy router's lines

_process = ""
_handler: logging.Handler | None = None  # of `setup`
_encoder = msgspec.json.Encoder(enc_hook=str)  # a router writes a line per request


def setup(process: str, level: str = "info") -> None:
    """Log this process's records, at `level` and above, as JSON lines that carry its name."""
    global _process, _handler
    _process = process
    _handler = handler = logging.StreamHandler(_StandardError())
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What no line shows is not looked up (see "Optimization" in the logging module's documentation).
    logging._srcfile = None  # type: ignore[attr-defined]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for noisy in ("asyncio", "grpc", "httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel("WARNING")


def info(log: logging.Logger, message: str, fields: Mapping[str, Any]) -> None:
    """As `log.info` with these fields, for a line that is written for every request.

    Without a record where nobody but this module's handler would see it: that makes most of a line's cost.
    """
    handler, root = _handler, logging.root
    if not isinstance(handler, logging.StreamHandler) or root.handlers != [handler] or log.handlers or log.filters:
        log.info(message, extra={"fields": fields})
        return
    if not log.isEnabledFor(logging.INFO):
        return
    text = _encoder.encode(_line(time.time(), "info", log.name, message, fields)).decode() + handler.terminator
    with handler.lock:  # type: ignore[union-attr]  # as the handler's own `handle`
        handler.stream.write(text)


def _line(at_s: float, level: str, logger: str, message: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "time": f"{_second(int(at_s))}.{int(at_s % 1 * 1000):03d}Z",
        "level": level,
        "process": _process,
        "logger": logger,
        "message": message,
        **fields,
    }


@lru_cache(maxsize=2)
def _second(at_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))


class Stopwatch:
    """Runs from its creation. `parts` has seconds for a line of the log: of each part of some work, by its name."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since = time.monotonic()

    def ended(self, part: str) -> None:
        """Note the seconds since the part before this one ended."""
        now = time.monotonic()
        self.parts[part], self._since = round(now - self._since, 3), now


class _StandardError:
    """Takes lines, and drops them while its reader is behind. None is cut: what is left of one is written first.

    Its callers hold the handler's lock.
    """

    def __init__(self) -> None:
        self._rest, self._num_dropped = b"", 0
        self._writable = select.poll()
        self._writable.register(_STDERR, select.POLLOUT)
        with suppress(OSError):  # it is no pipe
            fcntl.fcntl(_STDERR, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def write(self, line: str) -> None:
        if not self._has_written_rest():
            self._num_dropped += 1
            return
        if self._num_dropped:
            fields = {"lines": self._num_dropped}
            dropped = _line(time.time(), "warning", __name__, "log lines dropped: nobody read them in time", fields)
            line, self._num_dropped = f"{_encoder.encode(dropped).decode()}\n{line}", 0
        self._rest = line.encode()
        self._has_written_rest()

    def flush(self) -> None:
        """Do nothing: lines are written or dropped."""

    def _has_written_rest(self) -> bool:
        """Write as much as there is room for: a pipe that has any takes PIPE_BUF bytes at once."""
        with suppress(OSError):  # a line that cannot be written harms nobody
            while self._rest and self._writable.poll(0):
                written = os.write(_STDERR, self._rest[: select.PIPE_BUF])
                self._rest = self._rest[written:]
        return not self._rest


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = _line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()
