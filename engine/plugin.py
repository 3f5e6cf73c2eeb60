"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`)."""

import logging
import os
import sys

from engine.hooks.report import DEVICE_VARIABLE, ROLE_VARIABLE, report

logger = logging.getLogger(__name__)


def load() -> None:
    """Install this role's hooks, or end the process. Does nothing in an SGLang that Prelude did not start."""
    role = os.environ.get(ROLE_VARIABLE)
    if not role:
        return
    # SGLang's plugin loader logs exceptions and continues; only SystemExit passes through.
    try:
        from engine.hooks.installation import install

        report().hooks = install(role, os.environ[DEVICE_VARIABLE])
        report().write()
    except Exception as error:  # noqa: BLE001 no engine may run without its hooks
        logger.critical("Prelude's hooks could not be installed: %s", error)
        sys.exit(f"Prelude's hooks could not be installed: {error}")
