"""Report a full disk as StoreFull."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.store.errors import StoreFull
from process.exhaustion import is_disk_full


@contextmanager
def room_at(destination: Path) -> Iterator[None]:
    """Raise StoreFull if the block finds no room for a file at `destination`."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise StoreFull(
                f"there is no room for an adapter at {destination} ({error.strerror}); free or add disk space"
            ) from error
        raise
