"""Which addresses may reach the KV ports of an engine, its peers, and the hooks that keep strangers from them.

Peers of cluster.yaml are known by name, address or network. Discovered peers are listed in a file that the agent
writes.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

PEERS_VARIABLE = "PRELUDE_ENGINE_KV_PEERS"  # separated by commas; not set: everyone
FOUND_PEERS_VARIABLE = "PRELUDE_ENGINE_KV_FOUND_PEERS"  # file with those that come and go; not set: nobody does

_DOMAIN = b"prelude-kv"
_HANDSHAKE_MS = 3000  # after which those that are refused are disconnected; 30 s is libzmq's
_RESOLVE_EVERY_S = 10.0
_MAX_LOGGED = 64  # addresses; each is logged once

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class KvPeers:
    """The peers. Names are resolved again from time to time, since a pod's address changes. Not for several threads."""

    def __init__(
        self,
        peers: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        *,
        found: Path | None = None,  # file of `write_found_peers`
    ) -> None:
        self._networks: list[_Network] = []
        self._names: list[str] = []
        for peer in peers:
            try:
                self._networks.append(ipaddress.ip_network(peer, strict=False))
            except ValueError:
                self._names.append(peer)
        self._clock = clock
        self._resolved: dict[str, set[str]] = {}  # by name, what it had when it was last told
        self._resolved_at = -_RESOLVE_EVERY_S
        self._logged: set[str] = set()
        self._file = found
        self._file_version = (0, 0)
        self._found: frozenset[str] = frozenset()

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
        if self._file is not None and str(parsed) in self._found_now(self._file):
            return True
        if self._names and self._clock() - self._resolved_at >= _RESOLVE_EVERY_S:
            self._resolved_at = self._clock()
            for name in self._names:
                found = _addresses_of(name)
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

    def _found_now(self, file: Path) -> frozenset[str]:
        with contextlib.suppress(OSError):  # nobody has been found yet
            status = file.stat()
            if (version := (status.st_ino, status.st_mtime_ns)) != self._file_version:
                self._found, self._file_version = frozenset(file.read_text().split()), version
        return self._found


def write_found_peers(file: Path, addresses: Iterable[str]) -> None:
    """Replace the IP addresses in the file, for the engine's processes, which look there at each new connection."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text("".join(f"{ipaddress.ip_address(address)}\n" for address in sorted(addresses)))
    os.replace(new, file)


def _addresses_of(name: str) -> set[str] | None:
    """None if the name cannot be resolved now."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except UnicodeError:  # as of a name with two dots in a row, which no name server has
        return set()
    except OSError as error:
        return set() if error.errno == socket.EAI_NONAME else None


def bootstrap_for_peers(_result, server):
    """Refuse requests of strangers to the server that tells decode engines where a prefill engine's ranks are."""
    if PEERS_VARIABLE not in os.environ:
        return
    from aiohttp import web

    peers = _peers()

    @web.middleware
    async def for_peers(request, handler):
        if not await asyncio.to_thread(peers.include, request.remote or ""):
            return web.Response(status=403, text="not a peer of this cluster")
        return await handler(request)

    server.app.middlewares.append(for_peers)


def socket_for_peers(original, context, socket_type, host=None):
    """A socket to which only peers can connect: libzmq asks a handler inside the process (ZeroMQ RFC 27, ZAP)."""
    if PEERS_VARIABLE not in os.environ:
        return original(context, socket_type, host=host)
    import zmq

    _answer_handshakes(context, host)
    context.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)  # of sockets that are made from now on
    context.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    try:
        return original(context, socket_type, host=host)
    finally:
        context.sockopts.pop(zmq.ZAP_DOMAIN, None)
        context.sockopts.pop(zmq.HANDSHAKE_IVL, None)


def _peers(*more: str) -> KvPeers:
    found = os.environ.get(FOUND_PEERS_VARIABLE)
    return KvPeers((*os.environ[PEERS_VARIABLE].split(","), *more), found=Path(found) if found else None)


_guarded: weakref.WeakSet[object] = weakref.WeakSet()  # contexts


def _answer_handshakes(context, host) -> None:
    """Once for each context, as long as it lives."""
    import zmq

    if context in _guarded:
        return
    _guarded.add(context)
    handler = context.socket(zmq.REP)
    handler.linger = 0
    handler.bind("inproc://zeromq.zap.01")
    peers = _peers(*([host] if host else []))

    def answer() -> None:
        while True:
            try:
                version, request, _domain, address, *_ = handler.recv_multipart()
                is_peer = peers.include(address.decode())
                # 300, temporary: it is not answered, and connects again after _HANDSHAKE_MS. After a 400 libzmq would
                # never do so, and a peer may call before it is known here.
                status = (b"200", b"OK") if is_peer else (b"300", b"not a peer")
                handler.send_multipart([version, request, *status, b"", b""])
            except zmq.ContextTerminated:
                handler.close()
                return

    threading.Thread(target=answer, name="kv-peers", daemon=True).start()
