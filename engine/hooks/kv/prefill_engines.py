"""Body of the hook into what a decode engine does with a prefill engine unlike itself."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def decline_unlike(original, manager, bootstrap_addr):
    """Whether KV can come from the prefill engine at that address; SGLang raises where its pages or dtype differ.

    Nothing catches that in the scheduler, so the engine would end with all that it serves. Declined, the request fails.
    """
    try:
        return original(manager, bootstrap_addr)
    except RuntimeError as error:
        log.error("no KV from the prefill engine at %s: %s", bootstrap_addr, error)
        return False
