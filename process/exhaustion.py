"""What a process may run out of on its own host: descriptors, ports, buffers, disk space. No peer is to blame."""

from __future__ import annotations

import errno
import os
import resource
import socket
import ssl
from dataclasses import dataclass
from typing import TypeGuard

_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TEXTS = tuple(os.strerror(number) for number in _ERRORS)
_RESOLVER_ERRORS = frozenset({socket.EAI_SYSTEM, socket.EAI_MEMORY})
_MOST_OTHERS = 2048  # descriptors that are for neither clients nor engines


def is_exhaustion(error: BaseException | None) -> bool:
    """Whether an error says that this process or host is out of something, whatever it was about to reach or read."""
    if isinstance(error, socket.gaierror):  # a resolver that cannot open its files says that there is no such host
        return error.errno in _RESOLVER_ERRORS or not _can_open()
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno in _ERRORS


def is_disk_full(error: BaseException) -> TypeGuard[OSError]:
    """Whether a write failed because its file system, its quota or the file may have no more bytes."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def is_exhaustion_text(text: str) -> bool:
    """As `is_exhaustion`, for the text of a library that passes no numbers on."""
    return any(each in text for each in _TEXTS)


def raise_open_files(wanted: int) -> int:
    """Raise this process's limit of open files to what it wants, as far as it may. Returns the limit, at most that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


@dataclass(frozen=True, slots=True)
class RouterDescriptors:
    """How a router's descriptors are divided, so that neither kind of connection can take the other's.

    The rest is for agents, files and uploads, and to accept a client only to tell it that there is no room.
    """

    clients: int
    engines: int

    @classmethod
    def wanted(cls, max_clients: int) -> RouterDescriptors:
        """An answer of a pair takes two connections to engines."""
        return cls(max_clients, 2 * max_clients)

    def within(self, limit: int) -> RouterDescriptors:
        """As much as a limit of open files allows."""
        free = limit - min(_MOST_OTHERS, limit // 2)
        clients = min(self.clients, free // 2)
        return RouterDescriptors(clients, min(self.engines, free - clients))

    @property
    def limit(self) -> int:
        """The limit of open files that they need."""
        return self.clients + self.engines + _MOST_OTHERS


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
