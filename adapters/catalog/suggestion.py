"""What to say of names that are nearly the one that was asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wanted: str, names: Iterable[str]) -> str:
    """The end of a message, naming at most three of `names`; empty where none is near."""
    near = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
