"""How busy each part of the fleet is, as numbers that an autoscaler can act on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from router.fleet.fleet_state import FleetState

ROLES = ("prefill", "decode", "unified")


@dataclass(frozen=True, slots=True)
class Saturation:
    """One router's view of its placeable workers."""

    num_placeable: dict[str, int]  # by role
    queue_s: dict[str, float]  # by worker that reads prompts: seconds to read what this router has placed there
    kv_used: dict[str, float]  # by worker that generates, and reports its KV memory: share in use or promised

    @classmethod
    def of(cls, fleet: FleetState) -> Saturation:
        generating = (*fleet.decodes, *(worker for worker in fleet.readers if worker.role == "unified"))
        loads = {worker.name: fleet.loads[worker.name] for worker in generating}
        roles = Counter(worker.role for worker in (*fleet.readers, *fleet.decodes))
        return cls(
            {role: roles[role] for role in ROLES},
            {worker.name: fleet.loads[worker.name].queue_s for worker in fleet.readers},
            {name: load.used_kv_tokens / load.max_kv_tokens for name, load in loads.items() if load.max_kv_tokens},
        )
