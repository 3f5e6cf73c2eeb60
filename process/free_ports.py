"""Ports of this machine that are free, for processes that will listen on them soon."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 10240  # below are the ports of well-known services
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def unbound_socket(host: str) -> socket.socket:
    """A TCP socket for an address of `host`, of IPv4 if it has one. Raises OSError."""
    families = {found[0] for found in socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)}
    return socket.socket(socket.AF_INET if socket.AF_INET in families else socket.AF_INET6)


def bound_socket(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a free port of `host`, which holds the port until it is closed.

    The kernel gives ports from a range of its own to outgoing connections. One of those may be free now and taken when
    a process that is still starting wants it, so the port is from outside of that range where there is room.
    """
    listener = unbound_socket(host)
    try:
        first_given = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        first_given = 0
    for port in random.sample(range(_FIRST, first_given), 100) if first_given >= 2 * _FIRST else ():
        try:
            listener.bind((host, port))
        except OSError:
            continue
        return listener
    listener.bind((host, 0))
    return listener


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that is free now."""
    with bound_socket(host) as listener:
        return listener.getsockname()[1]
