"""Bodies of the hooks into NIXL's progress thread, which moves KV between engines."""

from __future__ import annotations

import types

# UCX's events wake the thread; the delay bounds the wait for an event that it missed. On two H200 200 us costs 0.02 of
# a core at rest (polling: a whole one), and transfers of 1 to 64 MiB take as long as with polling, or less.
_CPU_DELAY_US, _GPU_DELAY_US = 2000, 200


def patient_on_cpu(bindings):
    """NIXL's C++ bindings, with a progress thread that sleeps between events."""
    return _patient(bindings, _CPU_DELAY_US)


def patient_on_gpu(bindings):
    """The same for GPUs, whose transfers are shorter."""
    return _patient(bindings, _GPU_DELAY_US)


def _patient(bindings, delay_us: int):
    class PatientAgentConfig(bindings.nixlAgentConfig):  # type: ignore[name-defined]
        def __setattr__(self, name: str, value) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    patient = types.ModuleType(bindings.__name__)
    patient.__dict__.update(vars(bindings))
    patient.nixlAgentConfig = PatientAgentConfig  # type: ignore[attr-defined]
    return patient
