"""Objects as files of a local folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from adapters.files.durable import fsync, make_folder
from adapters.store.objects import Objects


class LocalObjects(Objects):
    """Publishes by rename. Files and their directory entries are on the disk when a method returns."""

    def write(self, key: str, chunks: Iterable[bytes]) -> None:
        path = self._path_in_folder(key)
        with self.reaching(key):
            file = self._filesystem.open(path, "wb")
        try:
            for chunk in chunks:
                with self.reaching(key):
                    file.write(chunk)
            with self.reaching(key):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with self.reaching(key):
                file.close()

    def move(self, source: str, target: str) -> None:
        path = self._path_in_folder(target)
        with self.reaching(target):
            os.replace(self.path_of(source), path)
            fsync(Path(path).parent)

    def touch(self, key: str) -> None:
        with self.reaching(key):
            os.utime(self.path_of(key))

    def make_root(self) -> None:
        """Create the store's folder if it does not exist."""
        with self.reaching(self._root):
            make_folder(Path(self._root))

    def _path_in_folder(self, key: str) -> str:
        """The path of a key; its folder is created if it is missing."""
        path = self.path_of(key)
        with self.reaching(key):
            make_folder(Path(path).parent)
        return path
