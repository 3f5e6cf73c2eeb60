"""Hooks that keep strangers from the ports over which engines arrange KV transfers."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from pathlib import Path

from engine.kv_peers import KvPeers

PEERS_VARIABLE = "PRELUDE_ENGINE_KV_PEERS"  # separated by commas; not set: everyone
FOUND_PEERS_VARIABLE = "PRELUDE_ENGINE_KV_FOUND_PEERS"  # file with those that come and go; not set: nobody does

_DOMAIN = b"prelude-kv"
_HANDSHAKE_MS = 3000  # after which those that are refused are disconnected; 30 s is libzmq's


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


@functools.cache
def _answer_handshakes(context, host) -> None:
    """Once for each context, as long as the process lives."""
    import zmq

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
