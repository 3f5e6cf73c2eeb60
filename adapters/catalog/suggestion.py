"""Suggest names that are close to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wanted: str, names: Iterable[str]) -> str:
    """The end of a message that suggests at most three of `names`; empty if none is close."""
    close = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
