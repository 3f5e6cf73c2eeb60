"""JSON forms of a catalog's records, the same over HTTP and on the command line."""

from collections.abc import Sequence
from typing import Any

from adapters.catalog.records import AdapterDetails, AdapterRevision, AdapterSummary, AliasMove, RevisionContent
from adapters.model.manifest import Manifest
from adapters.model.serving import why_experts_are_refused


def revision_as_json(revision: AdapterRevision, max_expert_rank: int) -> dict[str, Any]:
    """One revision of one adapter. `max_expert_rank`: what workers accept."""
    return {
        "object": "adapter.revision",
        "name": revision.full_name,
        "tenant": revision.tenant,
        **_content(revision, revision.manifest),
        "not_served": why_experts_are_refused(revision.manifest.expert_rank, max_expert_rank),  # why workers refuse it
        "warnings": revision.warnings,  # of its import
        "created_at": revision.created_at,
    }


def adapter_as_json(adapter: AdapterSummary) -> dict[str, Any]:
    """One adapter with its latest revision, as in lists."""
    return {
        "object": "adapter",
        "name": adapter.full_name,
        "tenant": adapter.tenant,
        "created_at": adapter.created_at,
        "deleted_at": adapter.deleted_at,
        "latest": _content(adapter, adapter),
    }


def details_as_json(details: AdapterDetails) -> dict[str, Any]:
    """One adapter with its aliases and its newest revisions."""
    return {
        **adapter_as_json(details.summary),
        "aliases": details.aliases,
        "splits": {alias: target.weights for alias, target in details.splits.items()},
        "revisions": [
            {**_content(each, each), "warnings": each.warnings, "created_at": each.created_at}
            for each in details.revisions
        ],
        "num_revisions": details.num_revisions,
    }


def move_as_json(full_name: str, move: AliasMove) -> dict[str, Any]:
    """One move of an alias of the adapter `full_name`. Percents by revision are there only where it is split."""
    ends = {"from_weights": move.origin and move.origin.weights, "weights": move.target.weights}
    return {
        "object": "adapter.alias",
        "name": full_name,
        "alias": move.alias,
        "from_number": move.from_number,
        "number": move.to_number,
        "moved_at": move.moved_at,
        "moved_by": move.moved_by,
        **{name: weights for name, weights in ends.items() if weights},
    }


def history_as_json(full_name: str, moves: Sequence[AliasMove], limit: int) -> dict[str, Any]:
    """The newest moves of an alias, newest first. One more than `limit` in `moves` means that there are more."""
    return {
        "object": "list",
        "data": [move_as_json(full_name, move) for move in moves[:limit]],
        "has_more": len(moves) > limit,
    }


def deletion_as_json(full_name: str, *, deleted: bool) -> dict[str, Any]:
    """The result of a deletion or a restoration."""
    return {"object": "adapter", "name": full_name, "deleted": deleted}


def _content(revision: RevisionContent | AdapterRevision, about: RevisionContent | Manifest) -> dict[str, Any]:
    return {
        "number": revision.number,
        "revision": revision.revision_id,
        "kinds": about.kinds,
        "positions": about.positions,
        "trained_positions": about.trained_positions,  # null: the same
        "base_model": about.base_model,
        "bytes": revision.bytes,
        "stored": revision.stored,
    }
