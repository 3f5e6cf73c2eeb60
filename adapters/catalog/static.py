"""A catalog that is read once, from the directories that `cluster.yaml` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.catalog.suggestion import did_you_mean
from adapters.errors import AdapterError, AdapterNotFound
from adapters.formats import Limits, read_adapter
from adapters.identity import DEFAULT_TENANT, LATEST, AdapterReference, full_name_of, split_adapter_name
from adapters.manifest import Manifest, revision_id_of
from adapters.revision import Revision


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


class StaticCatalog:
    """One revision per adapter, fixed at start. An adapter that cannot be read does not disturb the others."""

    def __init__(self, entries: Sequence[CatalogEntry]):
        self._entries = {(entry.tenant, entry.name): entry for entry in entries}

    @classmethod
    def load(cls, directories: Mapping[str, Path], base: BaseModel, limits: Limits) -> StaticCatalog:
        """Reads every directory. Raises ValueError for a name that is none or that is given twice."""
        entries: dict[tuple[str, str], CatalogEntry] = {}
        for full_name, directory in directories.items():
            key = split_adapter_name(full_name)
            if key in entries:
                raise ValueError(f"the adapter {full_name!r} is given twice, with and without its tenant; keep one")
            entries[key] = _read(*key, Path(directory), base, limits)
        return cls(list(entries.values()))

    def resolve(self, reference: str) -> Revision:
        """The revision that a reference stands for. Raises AdapterError."""
        wanted = AdapterReference.parse(reference)
        entry = self._entries.get((wanted.tenant, wanted.name))
        if entry is None:
            raise AdapterNotFound(f"there is no adapter {wanted.full_name!r}{self._near(wanted)}")
        if entry.error is not None:
            raise type(entry.error)(*entry.error.args)  # a fresh one: raising would add to the kept one's traceback
        revision = entry.revision
        assert revision is not None
        if wanted.revision_id not in (None, revision.revision_id):
            raise AdapterNotFound(
                f"the adapter {wanted.full_name!r} has no revision {wanted.revision_id}; it has {revision.revision_id}"
            )
        if wanted.number not in (None, 1):
            raise AdapterNotFound(f"the adapter {wanted.full_name!r} has no revision r{wanted.number}; it has r1 only")
        if wanted.alias not in (None, LATEST):
            raise AdapterNotFound(
                f"the adapter {wanted.full_name!r} has no alias {wanted.alias!r}; it has the alias {LATEST!r} only"
            )
        return revision

    def list(self) -> Sequence[CatalogEntry]:
        """Every adapter, by tenant and name; those of the default tenant first."""
        return sorted(self._entries.values(), key=lambda e: (e.tenant != DEFAULT_TENANT, e.tenant, e.name))

    def _near(self, wanted: AdapterReference) -> str:
        # Only the same tenant's names: others are none of the client's business.
        names = {entry.full_name for entry in self._entries.values() if entry.tenant == wanted.tenant}
        return did_you_mean(wanted.full_name, names)


def _read(tenant: str, name: str, directory: Path, base: BaseModel, limits: Limits) -> CatalogEntry:
    try:
        adapter = read_adapter(directory, base, limits)
    except AdapterError as error:
        return CatalogEntry(tenant, name, None, error.with_traceback(None))
    manifest, num_bytes = Manifest.of(adapter), adapter.num_file_bytes
    return CatalogEntry(tenant, name, Revision(tenant, name, revision_id_of(adapter), directory, manifest, num_bytes))
