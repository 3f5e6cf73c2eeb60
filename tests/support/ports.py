"""Ports for tests."""

import contextlib
import socket

from process.free_ports import bound_socket


def two_ports() -> int:
    """A port that is free, and so is the next one."""
    while True:
        with bound_socket() as first, contextlib.suppress(OSError), socket.socket() as second:
            second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            return first.getsockname()[1]
