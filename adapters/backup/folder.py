"""Where backups are: a folder, or a prefix of a bucket, that any number of them share.

catalogs/<UTC>-<SHA-256>.db     a catalog at one instant, as an SQLite file, and its digest
revisions/…                     the objects that they need, as in a store
"""

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path

from adapters.store import AdapterStore, StoreCorrupt
from adapters.store.errors import disk_full_at
from adapters.store.layout import new_incoming_key
from adapters.store.objects import CHUNK_BYTES
from adapters.store.store import open_objects

_FOLDER = "catalogs"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-([0-9a-f]{64})\.db")


class BackupFolder:
    """Catalogs by name, and the store of their revisions. Any method may raise StoreUnavailable."""

    def __init__(self, place: str, *, is_new: bool) -> None:
        """`place`: a path, or a URL as of a store, where the environment has S3's credentials. Raises ValueError."""
        self.url = place if "://" in place else f"file://{Path(place).resolve()}"
        if not is_new and self.url.startswith("file://") and not Path(self.url.removeprefix("file://")).is_dir():
            raise ValueError(f"{place} does not exist; name the folder that `prelude catalog backup` wrote")
        self._objects = open_objects(self.url)
        self.store = AdapterStore(self._objects)

    def add_catalog(self, file: Path, taken_at: datetime) -> str:
        """Add a catalog's file, complete or not at all; return its name."""
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            content.seek(0)
            name, temporary = f"{taken_at.astimezone(UTC):%Y%m%dT%H%M%S.%fZ}-{digest}.db", new_incoming_key()
            self._objects.write(temporary, iter(lambda: content.read(CHUNK_BYTES), b""))
        self._objects.move(temporary, f"{_FOLDER}/{name}")
        return name

    def fetch_catalog(self, name: str, target: Path) -> str:
        """Write the catalog of that name, or the newest if it is empty, to a new file; return its name.

        Raises ValueError if there is none, StoreCorrupt if its digest is not the one in its name.
        """
        entries = (entry.key.rpartition("/")[2] for entry in self._objects.list_folder(_FOLDER))
        names = sorted(each for each in entries if _NAME.fullmatch(each))
        if not names or name not in ("", *names):
            raise ValueError(f"{self.url} has no catalog {name}; it has {', '.join(names[-3:]) or 'none'}")
        name, digest = name or names[-1], hashlib.sha256()
        with disk_full_at(target), target.open("xb") as file:
            for chunk in self._objects.read(f"{_FOLDER}/{name}"):
                digest.update(chunk)
                file.write(chunk)
        if not name.endswith(f"-{digest.hexdigest()}.db"):
            raise StoreCorrupt(
                f"{_FOLDER}/{name} in {self.url} has SHA-256 {digest.hexdigest()}, not that of its name: it is damaged "
                "or was changed. Restore another one, with --catalog"
            )
        return name
