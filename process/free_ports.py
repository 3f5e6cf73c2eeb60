"""Ports of this machine that are free, for processes that will listen on them soon."""

import contextlib
import errno
import random
import socket
from collections import deque
from pathlib import Path

_FIRST = 10240  # below are the ports of well-known services
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # tests seed the common one, and two processes would choose alike
# Ports that this process has chosen: whoever is to listen there may still be starting. Of thirty out of 20,000, two
# would be equal in two of a hundred cases. Other processes know of the newest by names that end with this one.
_chosen: deque[int] = deque(maxlen=1000)
_claims: deque[socket.socket] = deque(maxlen=200)


def _unbound_socket(host: str) -> socket.socket:
    """A TCP socket for an address of `host`, of IPv4 if it has one. Raises OSError."""
    families = {found[0] for found in socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)}
    return socket.socket(socket.AF_INET if socket.AF_INET in families else socket.AF_INET6)


def bound_socket(host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to a free port of `host`, which holds the port until it is closed.

    The kernel gives ports from a range of its own to outgoing connections. One of those may be free now and taken when
    a process that is still starting wants it, so the port is from outside of that range where there is room.
    """
    listener = _unbound_socket(host)
    try:
        first_given = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        first_given = 0
    for port in _random.sample(range(_FIRST, first_given), 100) if first_given >= 2 * _FIRST else ():
        if port in _chosen:
            continue
        try:
            listener.bind((host, port))
        except OSError:
            continue
        if not _claim(port):
            listener.close()
            listener = _unbound_socket(host)
            continue
        _chosen.append(port)
        return listener
    listener.bind((host, 0))
    return listener


def _claim(port: int) -> bool:
    """False if another process on this host has chosen the port. Its names, as ports, are of a network namespace."""
    with contextlib.ExitStack() as stack:
        claim = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            claim.bind(f"\0prelude-port-{port}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE  # only Linux has names without files
        stack.pop_all()
    if len(_claims) == _claims.maxlen:
        _claims.popleft().close()
    _claims.append(claim)
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that is free now."""
    with bound_socket(host) as listener:
        return listener.getsockname()[1]
