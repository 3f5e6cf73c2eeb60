"""Body of the hook into what a decode engine does when a prefill engine's heartbeats have failed."""

from __future__ import annotations


def begin_anew(result, manager, failed_bootstrap_addr):
    """Forget the failures of a prefill engine that was given up: the next one at its address has none yet.

    Else they stay at their limit until its first heartbeat succeeds. If that one comes late, as on a machine that
    stalls, every request that waits for its KV fails.
    """
    manager.heartbeat_failures.pop(failed_bootstrap_addr, None)
    return result
