"""Whose an address is."""

import socket

import psutil
import pytest

from process.addresses import is_of_this_host

OWN = [
    address.address
    for addresses in psutil.net_if_addrs().values()
    for address in addresses
    if address.family in (socket.AF_INET, socket.AF_INET6)
]


@pytest.mark.parametrize("host", ["localhost", *OWN])
async def test_addresses_of_all_interfaces_are_of_this_host(host: str):
    assert await is_of_this_host(host)


# Documentation's networks (RFC 5737 and 3849), and a name that resolves to nothing (RFC 6761).
@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "nobody.invalid", "not a name", "a" * 64])
async def test_other_addresses_and_names_are_not(host: str):
    assert not await is_of_this_host(host)


async def test_one_of_a_names_addresses_is_enough(monkeypatch: pytest.MonkeyPatch):
    """As where a host has ::1 by its hosts file, and no IPv6."""

    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, 0)) for host in ("203.0.113.7", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert await is_of_this_host("localhost")
