"""A revision: an immutable, content-addressed version of an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.errors import AdapterChanged
from adapters.formats import Limits, read_adapter
from adapters.identity import full_name_of
from adapters.manifest import Manifest, revision_id_of
from adapters.normal_form import Adapter


@dataclass(frozen=True, slots=True)
class Revision:
    """What a catalog knows of one version of an adapter."""

    tenant: str
    name: str
    revision_id: str
    directory: Path
    manifest: Manifest
    bytes: int  # of the files in the directory that hold its weights

    @property
    def full_name(self) -> str:
        """`tenant/name`; the default tenant is left out."""
        return full_name_of(self.tenant, self.name)


def read_revision(directory: Path, revision_id: str, base: BaseModel, limits: Limits) -> Adapter:
    """Reads the adapter that a revision id names. Raises AdapterChanged where the directory now holds another."""
    adapter = read_adapter(directory, base, limits)
    if (found := revision_id_of(adapter)) != revision_id:
        raise AdapterChanged(
            f"{directory} now holds {found}, not {revision_id}: its files were changed; put the old ones back, or "
            "import the new ones as a revision of their own"
        )
    return adapter
