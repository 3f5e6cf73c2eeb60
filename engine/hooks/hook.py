"""One entry of the hook ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class HookKind(StrEnum):
    """How a hook meets its target."""

    AROUND = "around"  # SGLang's registry: fn(original, *args, **kwargs)
    AFTER = "after"  # SGLang's registry: fn(result, *args, **kwargs)
    GLOBAL = "global"  # fn(old_value) -> new value of one module-level name, in that module only


class Platform(StrEnum):
    """Where a hook is needed."""

    ANY = "any"
    CPU = "cpu"
    GPU = "cuda"


# "stock" is SGLang as it is, which benchmarks compare with: it has only what reports and what a CPU needs.
ALL_ROLES = frozenset({"prefill", "decode", "unified", "stock"})


@dataclass(frozen=True, slots=True)
class Hook:
    """A change of SGLang's behaviour, with all that is needed to install, verify, explain and one day remove it."""

    name: str
    target: str  # dotted path of a function or method; for GLOBAL, of a module-level name
    kind: HookKind
    fn: Callable[..., Any]
    source_sha256: str  # of the target's source at the pin; for GLOBAL, of the whole module's source
    why: str
    upstream: str
    remove_when: str
    roles: frozenset[str] = ALL_ROLES
    platform: Platform = Platform.ANY

    def applies_to(self, role: str, device: str) -> bool:
        """True where an engine of this role and device needs the hook."""
        return role in self.roles and self.platform in (Platform.ANY, device)
