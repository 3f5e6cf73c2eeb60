"""Reports of engine processes, read by the worker's agent: one JSON file per process, one of what requests lack."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

REPORT_DIR_VARIABLE = "PRELUDE_ENGINE_REPORTS"
ROLE_VARIABLE = "PRELUDE_ENGINE_ROLE"
DEVICE_VARIABLE = "PRELUDE_ENGINE_DEVICE"
_LACKING = "lacking-adapters"


@dataclass(slots=True)
class ProcessReport:
    """`process` is "server" or "scheduler-<tp rank>"; `adapter_tensors` counts tensors that can hold adapters."""

    process: str
    pid: int
    hooks: list[str]
    adapter_tensors: int | None = None
    lora_enabled: bool | None = None
    role: str | None = None  # of a scheduler
    num_adapters: int | None = None  # loaded when it began that role
    kv_end_s: float | None = None  # that its KV manager of the role before took to end

    def write(self) -> None:
        """Publish."""
        _publish(f"{self.pid}.json", asdict(self))


def _publish(name: str, content: object) -> None:
    """Write a file atomically, so that a reader never sees half of it."""
    folder = Path(os.environ[REPORT_DIR_VARIABLE])
    partial = folder / f".{os.getpid()}"
    partial.write_text(json.dumps(content))
    partial.rename(folder / name)


def read_reports(folder: Path) -> list[ProcessReport]:
    """Every report in the folder, sorted by process name."""
    reports = [ProcessReport(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    return sorted(reports, key=lambda report: report.process)


_lacking: dict[str, str] = {}  # as this process has written it


def report_lacking(adapters: dict[str, str]) -> None:
    """Publish which retracted requests, by id, wait for which revision to be loaded. All ranks write the same."""
    global _lacking
    if adapters != _lacking:
        _publish(_LACKING, adapters)
        _lacking = adapters


def read_lacking(folder: Path) -> dict[str, str]:
    """The revisions that retracted requests wait for, by the requests' ids."""
    try:
        return json.loads((folder / _LACKING).read_text())
    except FileNotFoundError:
        return {}


_report: ProcessReport | None = None


def report() -> ProcessReport:
    """The report of this process; the same object at every call."""
    global _report
    if _report is None:
        _report = ProcessReport(process="server", pid=os.getpid(), hooks=[])
    return _report


def _begin_anew() -> None:
    """In a forked process: it has the hooks of its parent, and a report of its own."""
    global _report
    if _report is not None:
        _report = ProcessReport(process="server", pid=os.getpid(), hooks=_report.hooks)


os.register_at_fork(after_in_child=_begin_anew)
