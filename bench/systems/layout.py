"""A layout: how many workers of each role a system has, written as `3p+1d`, `4u` or `2p+1d+1u`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.errors import OptionInvalid

_PARTS = re.compile(r"([1-9]\d?)([pdu])")
_ROLES = {"p": "prefill", "d": "decode", "u": "unified"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers by role; there is at least one that answers."""

    prefill: int = 0
    decode: int = 0
    unified: int = 0

    @staticmethod
    def parse(text: str) -> Layout:
        """Raises OptionInvalid."""
        counts: dict[str, int] = {}
        for part in text.split("+"):
            found = _PARTS.fullmatch(part)
            if found is None or _ROLES[found[2]] in counts:
                raise OptionInvalid(f"layout {text!r}: write counts of p, d and u, such as 3p+1d, 4u or 2p+1d+1u")
            counts[_ROLES[found[2]]] = int(found[1])
        layout = Layout(**counts)
        if bool(layout.prefill) != bool(layout.decode):
            raise OptionInvalid(f"layout {text!r}: prefill and decode workers (p, d) need each other")
        return layout

    def __str__(self) -> str:
        counts = {letter: getattr(self, role) for letter, role in _ROLES.items()}
        return "+".join(f"{count}{letter}" for letter, count in counts.items() if count)

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each worker, in the order of their GPUs."""
        return tuple(role for role in _ROLES.values() for _ in range(getattr(self, role)))
