"""When a certificate is valid."""

from __future__ import annotations

from typing import NamedTuple


class Validity(NamedTuple):
    """In seconds since the epoch, as time.time()."""

    begins: float
    ends: float
