"""Traces: when requests came, how long they were. JSON lines as of Mooncake, or with our own field names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.errors import BenchError

_MAX_LINES = 10_000_000
_MAX_TOKENS = 10_000_000


class _Line(msgspec.Struct):
    timestamp: float | None = None  # ms, as in Mooncake's traces
    at_s: float | None = None
    input_length: int | None = None
    prompt_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    adapter: int | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. Seconds since its start."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int | None  # None: as the adapter distribution says


def read_trace(path: Path) -> list[Arrival]:
    """A trace's requests in the order of time. Raises BenchError with the line that is wrong."""
    found = []
    try:
        lines = path.open("rb")
    except OSError as error:
        raise BenchError(f"--trace {path}: {error.strerror}") from error
    decoder = msgspec.json.Decoder(_Line)
    with lines:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                found.append(_arrival(decoder.decode(text)))
            except (msgspec.DecodeError, ValueError) as error:
                raise BenchError(f"--trace {path}, line {number}: {error}") from error
            if number > _MAX_LINES:
                raise BenchError(f"--trace {path}: more than {_MAX_LINES} lines")
    if not found:
        raise BenchError(f"--trace {path}: it has no requests")
    found.sort(key=lambda each: each.at_s)
    return [Arrival(each.at_s - found[0].at_s, each.prompt_tokens, each.output_tokens, each.adapter) for each in found]


def _arrival(line: _Line) -> Arrival:
    at_s = line.at_s if line.at_s is not None else None if line.timestamp is None else line.timestamp / 1000
    prompt = line.prompt_tokens if line.prompt_tokens is not None else line.input_length
    output = line.output_tokens if line.output_tokens is not None else line.output_length
    if at_s is None or not 0 <= at_s < 1e9:
        raise ValueError("it needs `at_s` in seconds, or `timestamp` in milliseconds, from 0 on")
    if prompt is None or output is None:
        raise ValueError("it needs `prompt_tokens` and `output_tokens`, or `input_length` and `output_length`")
    if not (0 < prompt <= _MAX_TOKENS and 0 < output <= _MAX_TOKENS):
        raise ValueError(f"{prompt} and {output} tokens: lengths are from 1 to {_MAX_TOKENS}")
    return Arrival(at_s, prompt, output, line.adapter)
