"""The inputs and results of placement.

Objects that every request creates are msgspec structs, which take a tenth of the time of frozen dataclasses to create.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from adapters.catalog.records import AdapterRevision
from router.fleet.fleet_state import WorkerView


class PromptSize(msgspec.Struct, frozen=True):
    """Estimates, in tokens. `blocks` are chained hashes of the prompt's beginning: equal blocks, equal prefixes."""

    prompt_tokens: int = 0
    kv_tokens: int = 0  # that the sequence may come to occupy, prompt included
    blocks: tuple[int, ...] = ()
    tokens_per_block: float = 0.0
    text_bytes: int = 0  # of JSON; 0 for token ids


_NO_SIZE = PromptSize()


class PlacementRequest(msgspec.Struct, frozen=True):
    """The properties of a request that placement may use."""

    revision_id: str | None  # None: the base model
    positions: str = "prefill"  # of the tokens that the revision acts on; "all" needs a unified worker
    is_stored: bool = True  # False: only workers that hold the revision can serve it
    needs_decode: bool = True  # False: its prompt is read and nothing is generated, so a prefill worker alone serves it
    size: PromptSize = _NO_SIZE
    demand: float = 0.0  # for this revision: workers that its recent prompts would have kept busy
    nonce: int = 0  # a random number: placement itself draws none
    namespace: str = ""  # of the prefix cache: only prompts of one namespace and revision share KV

    @classmethod
    def of(
        cls,
        revision: AdapterRevision | None,
        *,
        needs_decode: bool = True,
        size: PromptSize = _NO_SIZE,
        namespace: str = "",
    ) -> PlacementRequest:
        if revision is None:
            return cls(None, needs_decode=needs_decode, size=size, namespace=namespace)
        positions, is_stored = revision.manifest.positions, revision.stored
        return cls(revision.revision_id, positions, is_stored, needs_decode, size, namespace=namespace)

    @property
    def single_roles(self) -> tuple[str, ...]:
        """The roles of workers that can serve the request alone."""
        if self.needs_decode or self.positions == "all":
            return ("unified",)
        return ("prefill", "unified")

    def with_observations(self, demand: float, nonce: int) -> PlacementRequest:
        return PlacementRequest(
            self.revision_id,
            self.positions,
            self.is_stored,
            self.needs_decode,
            self.size,
            demand,
            nonce,
            self.namespace,
        )

    def can_be_read_by(self, worker: WorkerView) -> bool:
        """Whether the worker holds the revision or can fetch it, as far as the store is concerned."""
        return self.is_stored or self.revision_id is None or worker.residency.can_use_unstored(self.revision_id)


PlacementKey = tuple[str, str, str, str]


class Placement(msgspec.Struct, frozen=True):
    """A pair, whose prefill worker sends KV to its decode worker, or a single worker, which is then both.

    A single worker is a unified worker, or a prefill worker if nothing is generated.
    """

    prefill: WorkerView
    decode: WorkerView

    @property
    def is_single(self) -> bool:
        return self.prefill.name == self.decode.name

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Each worker once; the one that reads the prompt is the first."""
        return (self.prefill,) if self.is_single else (self.prefill, self.decode)

    @property
    def key(self) -> PlacementKey:
        """Identifies the two engines: a restarted engine has another incarnation, so another key."""
        return self.prefill.name, self.prefill.incarnation, self.decode.name, self.decode.incarnation

    def __str__(self) -> str:
        return ">".join(worker.name for worker in self.workers)


@dataclass(frozen=True, slots=True)
class FailedAttempts:
    """The workers and placements that have failed for one sequence so far."""

    placements: frozenset[PlacementKey] = frozenset()  # never tried again
    workers: frozenset[str] = frozenset()  # the last resort

    def with_placement(self, placement: Placement) -> FailedAttempts:
        return replace(self, placements=self.placements | {placement.key})

    def with_worker(self, name: str) -> FailedAttempts:
        return replace(self, workers=self.workers | {name})
