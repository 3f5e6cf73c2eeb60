"""The one log format: a JSON object per line, on standard error.

Loggers take fields by `extra`: `log.info("adapter loaded", extra={"fields": {"revision": ..., "load_s": ...}})`.
Never log prompts, keys or headers.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec

_process = ""
_encoder = msgspec.json.Encoder(enc_hook=str)  # a router writes a line per request


def setup(process: str, level: str = "info") -> None:
    """Log this process's records, at `level` and above, as JSON lines that carry its name."""
    global _process
    _process = process
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What no line shows is not looked up (see "Optimization" in the logging module's documentation).
    logging._srcfile = None  # type: ignore[attr-defined]
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for noisy in ("alembic", "asyncio", "grpc", "httpx", "uvicorn"):
        logging.getLogger(noisy).setLevel("WARNING")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": _process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()
