"""Errors of certificates."""

from __future__ import annotations

from pathlib import Path


class CertificateError(Exception):
    """A file of a certificate cannot be used. `field` is which: `certificate`, `key` or `ca`."""

    def __init__(self, field: str, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.field = field
        self.path = path
