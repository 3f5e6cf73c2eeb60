"""Checks whether this worker can serve a packed revision, and writes the configuration that its engine loads."""

from dataclasses import dataclass
from pathlib import Path

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats import Limits
from adapters.model.base_model import BaseModel
from adapters.model.serving import EngineDtype, why_experts_are_refused
from adapters.packed import PackedMetadata, read_packed, write_engine_config
from adapters.packed.fused_layout import ENGINE_MODULE_OF, EXPERT_MODULE_OF
from adapters.store.signing import Trust


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Decides which adapters one worker can serve."""

    base: BaseModel
    dtype: EngineDtype
    limits: Limits
    positions: frozenset[str]
    trust: Trust

    def prepare(self, revision_id: str, packed: Path, *, is_memory_only: bool = False) -> None:
        """Check a packed file's header and write adapter_config.json beside it. Blocking; reads no tensor.

        Raises AdapterMalformed, AdapterIncompatible and AdapterUnsupported.
        """
        revision = read_packed(packed)
        metadata = revision.metadata
        self._check(revision_id, metadata)
        revision.check_fits(self.base)
        write_engine_config(metadata, packed.parent, is_memory_only=is_memory_only)

    def _check(self, revision_id: str, metadata: PackedMetadata) -> None:
        if metadata.revision_id != revision_id:
            raise AdapterMalformed(
                f"the store's object of {revision_id} holds {metadata.revision_id}; delete it and import the adapter "
                "again"
            )
        if metadata.positions not in self.positions:
            raise AdapterUnsupported(
                f"{revision_id} acts on {metadata.positions!r} positions, which only a unified worker can serve"
            )
        expert_rank = 0 if metadata.experts is None else metadata.experts.rank
        if why := why_experts_are_refused(expert_rank, self.limits.max_expert_rank):
            raise AdapterUnsupported(f"{revision_id} cannot be served: {why}")
        if metadata.dtype != self.dtype:
            raise AdapterIncompatible(
                f"{revision_id} is stored in {metadata.dtype}, this cluster serves {self.dtype}; use a store of "
                "its own for each dtype"
            )
        if (rank := metadata.rank) > self.limits.max_rank:
            raise AdapterIncompatible(
                f"{revision_id} has rank {rank}, this worker takes at most {self.limits.max_rank} "
                "(adapter_limits.max_rank)"
            )
        served = {ENGINE_MODULE_OF.get(module, module) for module in self.limits.target_modules}
        if metadata.experts is not None:
            served |= {EXPERT_MODULE_OF[module] for module in self.limits.target_modules if module in EXPERT_MODULE_OF}
        if unserved := sorted({name for name, _, _ in metadata.all_modules} - served):
            raise AdapterIncompatible(
                f"{revision_id} adapts {', '.join(unserved)}, this worker only {', '.join(sorted(served))} "
                "(adapter_limits.target_modules)"
            )
