"""Which adapters there are and what their names stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from adapters.errors import AdapterError
from adapters.identity import full_name_of
from adapters.revision import Revision

__all__ = ["Catalog", "CatalogEntry"]


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One adapter and its latest revision, or why it has none."""

    tenant: str
    name: str
    revision: Revision | None
    error: AdapterError | None = None

    @property
    def full_name(self) -> str:
        """`tenant/name`; the default tenant is left out."""
        return full_name_of(self.tenant, self.name)


class Catalog(Protocol):
    """What routers and workers ask of a catalog."""

    def resolve(self, reference: str) -> Revision:
        """The revision that a reference stands for.

        Raises InvalidReference, AdapterNotFound, or the error that the adapter itself has.
        """
        ...

    def list(self) -> Sequence[CatalogEntry]:
        """Every adapter, by tenant and name."""
        ...
