"""Findings, and how probes run: each with a deadline, so that none can block or fail the others."""

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str
    remedy: str = ""
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """One check. If `look` raises or hangs, the finding is a warning."""

    topic: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float = 10.0


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def warning(text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, text, remedy)


def error(text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, text, remedy)


def run_probes(probes: Sequence[Probe]) -> list[Finding]:
    """Run all probes concurrently; the findings in the order of the probes. Takes at most the longest deadline."""
    found: dict[int, list[Finding]] = {}

    def look(number: int, probe: Probe) -> None:
        try:
            found[number] = list(probe.look())
        except Exception as failure:  # noqa: BLE001  the edge of a probe: the report must go on
            text = f"cannot be looked at: {type(failure).__name__}: {failure}"
            found[number] = [warning(text, "look at it by hand, and report this message")]

    threads = [threading.Thread(target=look, args=each, daemon=True) for each in enumerate(probes)]
    begun_s = time.monotonic()
    for thread in threads:
        thread.start()
    report = []
    for number, (probe, thread) in enumerate(zip(probes, threads, strict=True)):
        thread.join(max(0.0, begun_s + probe.deadline_s - time.monotonic()))
        late = warning(f"no answer within {probe.deadline_s:g} s", "something hangs: look at the driver and at dmesg")
        report += [replace(each, topic=probe.topic) for each in found.get(number, [late])]
    return report
