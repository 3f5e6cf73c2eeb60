"""The data types of alerts and recording rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning"]  # critical: users are hurt, or will be within hours


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert."""

    name: str
    severity: Severity
    expression: str
    lasting: str  # how long the expression has to hold; "0m": not at all
    page: str  # of docs/operations, without .md; it has a section with the alert's name
    summary: str
    description: str  # a template of Prometheus


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recording rule."""

    name: str
    expression: str
