"""Body of the hook into NIXL's progress thread, which moves KV between engines."""

from __future__ import annotations

import os
import types

from engine.hooks.report import DEVICE_VARIABLE

# UCX's events wake the thread; the delay bounds the wait for an event that it missed. On two H200 200 us costs 0.02 of
# a core at rest (polling: a whole one), and transfers of 1 to 64 MiB take as long as with polling, or less.
_DELAY_US = {"cpu": 2000, "cuda": 200}  # a GPU's transfers are shorter


def patient(bindings):
    """NIXL's C++ bindings, with a progress thread that sleeps between events."""
    delay_us = _DELAY_US[os.environ[DEVICE_VARIABLE]]

    class PatientAgentConfig(bindings.nixlAgentConfig):  # type: ignore[name-defined]
        def __setattr__(self, name: str, value) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    made = types.ModuleType(bindings.__name__)
    made.__dict__.update(vars(bindings))
    made.nixlAgentConfig = PatientAgentConfig  # type: ignore[attr-defined]
    return made
