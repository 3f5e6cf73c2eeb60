"""Read an untrusted adapter directory: no links, no special files, nothing outside it, nothing too large."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from adapters.errors import (
    AdapterIncompatible,
    AdapterMalformed,
    AdapterMissing,
    AdapterTooLarge,
    AdapterUnsupported,
    HostExhausted,
)
from adapters.model.base_model import MODULES

_MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that are checked before and while an adapter is read."""

    max_rank: int = 64
    max_bytes: int = 2 * 1024**3  # of the file of weights
    target_modules: tuple[str, ...] = MODULES  # the projections that the engine can adapt
    max_expert_rank: int = 0  # of LoRA on experts that workers accept; an import takes any
    serves_all_positions: bool = True  # there is a unified worker

    def check_modules(self, modules: Iterable[str]) -> None:
        """Raise AdapterIncompatible for a projection that this deployment does not adapt."""
        for module in modules:
            if module not in self.target_modules:
                raise AdapterIncompatible(
                    f"the adapter changes {module}, but this deployment adapts {', '.join(self.target_modules)}; "
                    "add it to adapter_limits.target_modules"
                )

    def check_rank(self, rank: int, where: str) -> None:
        """Raise AdapterIncompatible for a rank above the deployment's limit."""
        if rank > self.max_rank:
            raise AdapterIncompatible(
                f"{where} has rank {rank}, over this deployment's limit of {self.max_rank}; "
                "train with a lower rank or raise adapter_limits.max_rank"
            )


class AdapterFolder:
    """The regular files directly in one directory; subdirectories are ignored."""

    def __init__(self, directory: Path, limits: Limits):
        self.directory = directory
        self.limits = limits
        self.names = frozenset(self._list())

    def _list(self) -> Iterator[str]:
        try:
            status = self.directory.lstat()
        except (OSError, ValueError) as error:
            raise AdapterMissing(
                f"{self.directory} cannot be read ({_reason(error)}); an adapter's directory must exist and be readable"
            ) from error
        if stat.S_ISLNK(status.st_mode):
            raise AdapterUnsupported(f"{self.directory} is a symbolic link; name the directory itself")
        if not stat.S_ISDIR(status.st_mode):
            raise AdapterMissing(
                f"{self.directory} is not a directory; name the directory that holds the adapter's files"
            )
        try:
            with os.scandir(self.directory) as entries:
                for count, entry in enumerate(entries):
                    if count >= _MAX_ENTRIES:
                        raise AdapterMalformed(f"{self.directory} has over {_MAX_ENTRIES} entries; it is no adapter")
                    if entry.is_symlink():
                        raise AdapterUnsupported(
                            f"{entry.name!r} in {self.directory} is a symbolic link; "
                            "copy the files themselves (cp -rL) into the adapter's directory"
                        )
                    if entry.is_file(follow_symlinks=False):
                        yield entry.name
        except OSError as error:
            HostExhausted.check(error)
            raise AdapterMissing(f"{self.directory} cannot be listed ({_reason(error)})") from error

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[int, int]]:
        """Open one regular file without following links; yield (file descriptor, size in bytes)."""
        try:
            descriptor = os.open(self.directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            HostExhausted.check(error)
            raise AdapterMalformed(f"{name!r} in {self.directory} cannot be read ({_reason(error)})") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise AdapterMalformed(f"{name!r} in {self.directory} is not a regular file")
            yield descriptor, status.st_size
        except OSError as error:
            HostExhausted.check(error)
            raise AdapterMalformed(f"{name!r} in {self.directory} cannot be read ({_reason(error)})") from error
        finally:
            os.close(descriptor)

    def read_small(self, name: str, max_bytes: int) -> bytes:
        """Read the whole of a file that must be small, such as a configuration."""
        with self.open(name) as (descriptor, num_bytes):
            if num_bytes > max_bytes:
                raise AdapterTooLarge(
                    f"{name!r} in {self.directory} has {num_bytes} bytes; at most {max_bytes} are read"
                )
            chunks, left = [], num_bytes
            while left and (chunk := os.read(descriptor, left)):
                chunks.append(chunk)
                left -= len(chunk)
        return b"".join(chunks)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
