"""The ledger: every hook of Prelude into SGLang, as data, grouped by what SGLang lacks.

Installation, verification, the page docs/sglang-hooks.md and the tests are made from it.
"""

from engine.hooks.hook import Hook, HookGroup
from engine.hooks.ledger import adapters, guards, platforms, reports, requests, transfers

GROUPS: tuple[HookGroup, ...] = (
    *reports.GROUPS,
    *guards.GROUPS,
    *requests.GROUPS,
    *transfers.GROUPS,
    *adapters.GROUPS,
    *platforms.GROUPS,
)

HOOKS: tuple[Hook, ...] = tuple(hook for group in GROUPS for hook in group.hooks)


def hooks_for(role: str, device: str) -> tuple[Hook, ...]:
    """The hooks that an engine of this role on this device ("cpu" or "cuda") must have."""
    return tuple(hook for hook in HOOKS if hook.applies_to(role, device))
