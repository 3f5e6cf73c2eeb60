"""The one log format: a JSON object per line, on standard error.

Loggers take fields by `extra`: `log.info("adapter loaded", extra={"fields": {"revision": ..., "load_s": ...}})`.
Never log prompts, keys or headers.
"""

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

_process = ""
_handler: logging.Handler | None = None  # of `setup`
_encoder = msgspec.json.Encoder(enc_hook=str)  # a router writes a line per request


def setup(process: str, level: str = "info") -> None:
    """Log this process's records, at `level` and above, as JSON lines that carry its name."""
    global _process, _handler
    _process = process
    _handler = handler = logging.StreamHandler(sys.stderr)
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
    stream = handler.stream
    with handler.lock, suppress(OSError, ValueError):  # type: ignore[union-attr]  # as the handler's own `handle`
        stream.write(text)  # a line that cannot be written harms nobody
        if not getattr(stream, "line_buffering", False):  # as standard error is: it has written the line
            stream.flush()


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


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line = _line(record.created, record.levelname.lower(), record.name, record.getMessage(), fields)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()
