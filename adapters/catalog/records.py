"""The records that a catalog returns."""

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal

from adapters.identity import full_name_of
from adapters.model.manifest import Manifest
from adapters.scopes import Permission, Scope

ChangeKind = Literal[
    "import", "stored", "alias", "delete", "restore", "purge", "removed", "sharing", "keys", "grants", "tenants"
]


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
    shares_prefixes: bool = False  # all tenants that use the adapter share one prefix cache
    warnings: tuple[str, ...] = ()  # of its import

    @property
    def full_name(self) -> str:
        """`tenant/name`, or `name` for the default tenant."""
        return full_name_of(self.tenant, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionContent:
    """What listings say of a revision's content."""

    number: int
    revision_id: str
    kinds: tuple[str, ...]
    positions: str
    trained_positions: str | None  # where they are others
    base_model: str  # fingerprint
    bytes: int
    stored: bool  # False: memory-only


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSummary(RevisionContent):
    """One adapter in a listing, with its latest revision."""

    tenant: str
    name: str
    created_at: datetime
    deleted_at: datetime | None

    @property
    def full_name(self) -> str:
        """`tenant/name`, or `name` for the default tenant."""
        return full_name_of(self.tenant, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionSummary(RevisionContent):
    """One revision in an adapter's history."""

    created_at: datetime
    warnings: tuple[str, ...]  # of its import


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


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What the catalog keeps of a key."""

    key_id: str
    tenant: str
    name: str
    digest: bytes  # SHA-256 of the key
    scopes: frozenset[Scope]
    created_at: datetime
    created_by: str | None
    expires_at: datetime | None  # None: never
    revoked_at: datetime | None

    def is_usable(self, now: datetime) -> bool:
        """Neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class Grant:
    """A tenant's permission to use another tenant's adapters."""

    owner: str
    name: str | None  # of one adapter; None: all of the owner's, future ones too
    grantee: str
    permission: Permission


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """A tenant, with what it has."""

    name: str
    created_at: datetime
    num_adapters: int  # deleted ones that can be restored included
    num_keys: int  # usable or not
    num_grants: int  # given and received


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One change or denial. Has no prompt and no key.

    What is not printable is escaped in every text: strangers choose some of them, PostgreSQL stores no NUL, and a
    terminal obeys control characters.
    """

    at: datetime
    who: str
    tenant: str | None  # of who; None: an operator at the command line, or nobody known
    action: str
    object: str | None
    old: str | None  # revision, where one was replaced
    new: str | None
    outcome: str  # "done", or the code of the error
    request_id: str | None

    def __post_init__(self) -> None:
        for each in fields(self):
            if isinstance(text := getattr(self, each.name), str) and not text.isprintable():
                object.__setattr__(self, each.name, "".join(map(_printable, text)))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
