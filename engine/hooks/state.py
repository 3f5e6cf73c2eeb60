"""This process's report, shared by the installer and the hooks that extend it."""

from __future__ import annotations

import os

from engine.hooks.report import ProcessReport

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
