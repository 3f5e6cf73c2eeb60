"""Addresses as URLs and gRPC write them, and whose they are."""

import asyncio
import contextlib
import socket


def host_and_port(host: str, port: int) -> str:
    """Host and port as in a URL: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def is_of_this_host(host: str) -> bool:
    """Whether a name or address is one of this host's, or pod's: sockets can be bound to no other."""
    with contextlib.suppress(OSError, UnicodeError):  # of a name that nobody has, or can have
        found = await asyncio.to_thread(socket.getaddrinfo, host, 0, type=socket.SOCK_DGRAM)  # uvloop's loses scopes
        for family, kind, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False
