"""Removes clients' text from an engine's output, since SGLang prints grammars that it cannot compile, and more.

Also finds, in the output of an engine that has not started, why.
"""

import re
from collections.abc import Sequence

REMOVED = "[not shown: it may quote a request]"
_PREFIX = re.compile(r"\[20\d\d-[^\]]*\] |(?:INFO|WARNING|ERROR|CRITICAL):\s+")  # of SGLang's records, of uvicorn's
_NUMBERS_ONLY = re.compile(
    r"(?:Prefill|Decode) batch|Cache flushed|Retract requests|KV cache pool is full|watchdog|KV room "
    r"|[\d.]+:\d+ - \"[A-Z]+ /[\w/.-]* HTTP/[\d.]+\" \d+",
    re.IGNORECASE,
)
_QUOTES = re.compile(r"[=:]\s?|['\"`{\[(]")  # where a record may begin to quote
_FRAME = re.compile(r'\s*File "[^"]*", line \d+, in \S+$')
_ERROR = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?::.*)?$")
_OF_THE_MACHINE = re.compile(r"(?:torch\.)?(?:cuda\.)?(?:OutOfMemory|Accelerator)Error|MemoryError|OSError|NCCL\w*")
_STAMP = re.compile(r"\[[^\]]*\] ")
_RAISED = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Mismatch|Failed|Refused|NotRun)(?::|$)"
    r"|[\w. -]+: error: "  # of an argument
)
_OURS = "could not be installed: "  # by `engine/plugin.py`, which ends the process after it
_NOISE = re.compile(r"\w*Warning: |nanobind| - leaked ")  # the latter of Triton, as a process ends
_MOST_REASON = 1000  # characters


def reason_in(lines: Sequence[str]) -> str:
    """The last error of an output; else its last lines, without warnings, what follows them, and leaks."""
    for line in reversed(lines):
        text = line[match.end() :] if (match := _STAMP.match(line)) else line
        if _RAISED.match(text) or _OURS in text:
            return text[:_MOST_REASON]
    said = [
        line for before, line in zip(["", *lines], lines, strict=False)
        if not _NOISE.search(line) and not (_NOISE.search(before) and line.startswith(" "))
    ]  # fmt: skip
    return " | ".join(said[-6:])[-_MOST_REASON:]


class EngineOutput:
    """Removes clients' text from an engine's lines, in order. Until there are clients, everything is shown."""

    def __init__(self) -> None:
        self.has_clients = False
        self._follows_frame = False

    def shown(self, line: str) -> str | None:
        """What may be logged of a line, None for nothing: of records their beginning, of tracebacks the frames."""
        if not self.has_clients:
            return line
        follows_frame, self._follows_frame = self._follows_frame, _FRAME.match(line) is not None
        if self._follows_frame or follows_frame or line.startswith("Traceback "):  # after a frame: its line of code
            return line
        prefix = _PREFIX.match(line)
        if prefix is None:
            error = _ERROR.match(line)
            if error is None:
                return None
            return line if _OF_THE_MACHINE.match(line) else f"{error['name']}: {REMOVED}"
        if _NUMBERS_ONLY.match(line, prefix.end()):
            return line
        quotes = _QUOTES.search(line, prefix.end())
        return line if quotes is None else f"{line[: quotes.start()]}: {REMOVED}"
