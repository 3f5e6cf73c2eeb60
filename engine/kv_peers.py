"""Which addresses may reach the KV ports of an engine: its peers of cluster.yaml, by name, address or network."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

_RESOLVE_EVERY_S = 10.0
_MAX_LOGGED = 64  # addresses; each is logged once

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class KvPeers:
    """The peers. Names are resolved again from time to time, since a pod's address changes. Not for several threads."""

    def __init__(
        self,
        peers: Iterable[str],
        resolve: Callable[[str], set[str] | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._networks: list[_Network] = []
        self._names: list[str] = []
        for peer in peers:
            try:
                self._networks.append(ipaddress.ip_network(peer, strict=False))
            except ValueError:
                self._names.append(peer)
        self._resolve = resolve or _addresses_of
        self._clock = clock
        self._resolved: dict[str, set[str]] = {}  # by name, what it had when it was last told
        self._resolved_at = -_RESOLVE_EVERY_S
        self._logged: set[str] = set()

    def include(self, address: str) -> bool:
        """Whether a peer has this address. Logs those that none has, each once. May resolve names, so it may block."""
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None)
        parsed = mapped or parsed
        if parsed.is_loopback or any(parsed in network for network in self._networks):
            return True
        if self._names and self._clock() - self._resolved_at >= _RESOLVE_EVERY_S:
            self._resolved_at = self._clock()
            for name in self._names:
                found = self._resolve(name)
                if found is not None:
                    self._resolved[name] = found
        if any(str(parsed) in found for found in self._resolved.values()):
            return True
        if address not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(address)
            log.warning(
                "Prelude refused a KV peer at %s: it is not a peer in this cluster; see engine.kv_peers", address
            )
        return False


def _addresses_of(name: str) -> set[str] | None:
    """None if the name cannot be resolved now."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        return set() if error.errno == socket.EAI_NONAME else None
