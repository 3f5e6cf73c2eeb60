"""The records that a catalog returns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal, Self

from adapters.identity import full_name_of
from adapters.model.manifest import Manifest
from adapters.scopes import Permission, Scope

ChangeKind = Literal[
    "import", "stored", "alias", "delete", "restore", "purge", "removed", "sharing", "keys", "grants", "tenants"
]


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """Where an alias points: at one revision, or at two that share its requests."""

    number: int  # of the older one of two
    newer: int | None = None
    percent: int = 0  # of the requests, that the newer one gets: 1 to 99

    @classmethod
    def split(cls, weights: Sequence[tuple[int, int]]) -> Self:
        """Two revisions by number, each with its percent. Raises ValueError with the rule.

        Not more: a share that grows takes from the other one. Among three, the rest would move between the other two.
        """
        (older, percent), (newer, of_newer) = sorted(weights) if len(weights) == 2 else ((0, 0), (0, 0))
        if older == newer or percent < 1 or of_newer < 1 or percent + of_newer != 100:
            found = ", ".join(f"r{number} {percent}" for number, percent in weights[:3]) or "none"
            raise ValueError(
                "the weights of an alias are those of two revisions, in whole percent from 1 to 99, 100 together "
                f"(found {found}{', …' if len(weights) > 3 else ''}); name one that gets all without a weight"
            )
        return cls(older, newer, of_newer)

    @property
    def weights(self) -> dict[str, int] | None:
        """Percent by `rN`; None of a single revision."""
        if self.newer is None:
            return None
        return {f"r{self.number}": 100 - self.percent, f"r{self.newer}": self.percent}

    def __str__(self) -> str:
        if (weights := self.weights) is None:
            return f"r{self.number}"
        return ", ".join(f"{revision} {percent}%" for revision, percent in weights.items())


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
    split: "AliasSplit | None" = None  # of the alias by which it was found, which is split over it and a newer one

    @property
    def full_name(self) -> str:
        """`tenant/name`, or `name` for the default tenant."""
        return full_name_of(self.tenant, self.name)


@dataclass(frozen=True, slots=True)
class AliasSplit:
    """What an alias that is split over two revisions has beside the older one."""

    alias: str  # `tenant/name@alias`
    target: AliasTarget
    newer: AdapterRevision


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
    aliases: dict[str, int]  # alias -> revision number, of two the older one's; by alias
    splits: dict[str, AliasTarget]  # of the aliases that are split
    revisions: tuple[RevisionSummary, ...]  # newest first
    num_revisions: int  # of all, shown or not


@dataclass(frozen=True, slots=True)
class AliasMove:
    """One move of an alias."""

    sequence: int  # of the change that it was part of
    alias: str
    origin: AliasTarget | None  # None: the alias was new
    target: AliasTarget
    moved_at: datetime
    moved_by: str | None

    @property
    def from_number(self) -> int | None:
        return None if self.origin is None else self.origin.number

    @property
    def to_number(self) -> int:
        return self.target.number


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
