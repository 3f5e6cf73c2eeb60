"""Objects in a store, and looks behind its back."""

import hashlib
from pathlib import Path

from adapters.store import AdapterStore


def revision(number: int | str) -> str:
    """The id of some content."""
    return f"sha256:{hashlib.sha256(str(number).encode()).hexdigest()}"


def source(folder: Path, content: bytes) -> Path:
    path = folder / f"source-{hashlib.sha256(content).hexdigest()[:16]}"
    path.write_bytes(content)
    return path


def stored(store: AdapterStore) -> list[str]:
    return [each.revision_id for each in store.list()]


def overwrite(store: AdapterStore, key: str, data: bytes) -> None:
    """Puts bytes where the store did not."""
    filesystem, path = store._objects._filesystem, store._objects.path_of(key)
    filesystem.makedirs(filesystem._parent(path), exist_ok=True)
    filesystem.pipe_file(path, data)


def raw(store: AdapterStore, key: str) -> bytes:
    return b"".join(store._objects.read(key))


def num_incoming(store: AdapterStore) -> int:
    return len(list(store.incoming_older_than(-3600)))
