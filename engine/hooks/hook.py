"""One entry of the hook ledger."""

import functools
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class HookKind(StrEnum):
    """How a hook attaches to its target."""

    AROUND = "around"  # SGLang's registry: fn(original, *args, **kwargs)
    AFTER = "after"  # SGLang's registry: fn(result, *args, **kwargs)
    GLOBAL = "global"  # fn(old_value) -> new value of one module-level name, in that module only


class Platform(StrEnum):
    """Where a hook is needed."""

    ANY = "any"
    CPU = "cpu"
    GPU = "cuda"


# "stock" is unmodified SGLang, the baseline of benchmarks: it gets the hooks that report and those a CPU needs.
ALL_ROLES = frozenset({"prefill", "decode", "unified", "stock"})
ADAPTER_ROLES = frozenset({"prefill", "unified"})
LORA_ROLES = frozenset({"prefill", "unified", "stock"})
DECODE = frozenset({"decode"})
UNIFIED = frozenset({"unified"})
GENERATING_ROLES = frozenset({"decode", "unified"})
PAIR_ROLES = frozenset({"prefill", "decode"})
TRANSFER_ROLES = PAIR_ROLES | {"stock"}  # a benchmark has stock SGLang's pair, too
OUR_ROLES = frozenset({"prefill", "decode", "unified"})
SWITCHING = "switching"  # a prefill engine that becomes a decode engine and back, by SGLang's /pd_role_switch


def can_be(role: str, roles: Collection[str]) -> bool:
    """Whether an engine that is started in this role is or becomes one of these."""
    return role in roles or (role == SWITCHING and not PAIR_ROLES.isdisjoint(roles))


@dataclass(frozen=True, slots=True)
class Hook:
    """A change of SGLang's behaviour, with all that is needed to install, verify and explain it."""

    name: str
    target: str  # dotted path of a function or method; for GLOBAL, of a module-level name
    fn: Callable[..., Any]
    source_sha256: str  # of the target's source at the pin; for GLOBAL, of the whole module's source
    why: str
    kind: HookKind = HookKind.AROUND
    roles: frozenset[str] = ALL_ROLES
    platform: Platform = Platform.ANY

    def applies_to(self, role: str, device: str) -> bool:
        """Whether an engine of this role on this device needs the hook."""
        return can_be(role, self.roles) and self.platform in (Platform.ANY, device)


@dataclass(frozen=True, slots=True)
class HookGroup:
    """Hooks that supply one thing that SGLang lacks, and are removed once it has it.

    Where that is a fault of SGLang, docs/upstream has a patch with the name of a hook.
    """

    lacking: str
    remove_when: str  # the change in SGLang that makes the hooks superfluous
    hooks: tuple[Hook, ...]


def module_with(module: Any, **names: Any) -> types.ModuleType:
    """What a GLOBAL hook puts in a module's place: it has these names, and for the others the module's."""
    made = types.ModuleType(module.__name__)
    vars(made).update(names, __getattr__=functools.partial(getattr, module))
    return made
