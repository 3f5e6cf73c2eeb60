"""The records that a catalog returns."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from adapters.identity import full_name_of
from adapters.model.manifest import Manifest

ChangeKind = Literal["import", "stored", "alias", "delete", "restore", "purge", "removed"]


@dataclass(frozen=True, slots=True)
class AdapterRevision:
    """One revision of one adapter. Other adapters can have the same content."""

    tenant: str
    name: str
    number: int  # 7 of `name@r7`; never reused for other content
    revision_id: str
    manifest: Manifest
    bytes: int  # of the packed content
    created_at: datetime  # when it was added to this adapter
    stored: bool  # False: memory-only, no store has it

    @property
    def full_name(self) -> str:
        """`tenant/name`, or `name` for the default tenant."""
        return full_name_of(self.tenant, self.name)


@dataclass(frozen=True, slots=True)
class AdapterSummary:
    """One adapter in a listing, with its latest revision."""

    tenant: str
    name: str
    created_at: datetime
    deleted_at: datetime | None
    number: int  # of the latest revision, as all that follows
    revision_id: str
    kinds: tuple[str, ...]
    positions: str
    base_model: str  # fingerprint
    bytes: int
    stored: bool  # False: memory-only

    @property
    def full_name(self) -> str:
        """`tenant/name`, or `name` for the default tenant."""
        return full_name_of(self.tenant, self.name)


@dataclass(frozen=True, slots=True)
class RevisionSummary:
    """One revision in an adapter's history."""

    number: int
    revision_id: str
    kinds: tuple[str, ...]
    positions: str
    base_model: str  # fingerprint
    bytes: int
    created_at: datetime
    stored: bool  # False: memory-only


@dataclass(frozen=True, slots=True)
class AdapterDetails:
    """One adapter with its aliases and its newest revisions."""

    summary: AdapterSummary
    aliases: dict[str, int]  # alias -> revision number, by alias
    revisions: tuple[RevisionSummary, ...]  # newest first
    num_revisions: int  # of all, shown or not


@dataclass(frozen=True, slots=True)
class AliasMove:
    """One move of an alias."""

    sequence: int  # of the change that it was part of
    alias: str
    from_number: int | None  # None: the alias was new
    to_number: int
    moved_at: datetime
    moved_by: str | None


@dataclass(frozen=True, slots=True)
class Change:
    """One committed change of the catalog."""

    sequence: int  # 1, 2, …, in the order of the commits, without gaps
    kind: ChangeKind
    tenant: str | None  # None, as the name, where no adapter changed
    name: str | None
