"""Bodies of the hooks into what a decode engine does with a prefill engine that is given up, or unlike itself."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def begin_anew(result, manager, failed_bootstrap_addr):
    """Forget the failures of a prefill engine that was given up: the next one at its address has none yet.

    Else they stay at their limit until its first heartbeat succeeds. If that one comes late, as on a machine that
    stalls, every request that waits for its KV fails.
    """
    manager.heartbeat_failures.pop(failed_bootstrap_addr, None)
    return result


def decline_unlike(original, manager, bootstrap_addr):
    """Whether KV can come from the prefill engine at that address; SGLang raises where its pages or dtype differ.

    Nothing catches that in the scheduler, so the engine would end with all that it serves. Declined, the request fails.
    """
    try:
        return original(manager, bootstrap_addr)
    except RuntimeError as error:
        log.error("no KV from the prefill engine at %s: %s", bootstrap_addr, error)
        return False
