"""A client's connection from accept to the end of its TLS handshake, within the limits of all connections.

With `ssl=`, an event loop's server creates the protocol only after the handshake, so silent connections would not be
counted. So the server listens without TLS, and this protocol counts each connection before it starts TLS on it.
"""

import asyncio
import asyncio.sslproto
import math
import ssl
from typing import Any

import uvloop

from router.http.client_connection import ClientProtocol
from router.http.connections import ClientConnections, Refusal


class TlsHandshake(asyncio.Protocol):
    """Starts TLS on a new connection. Its place among the connections goes to `client` when the handshake is done."""

    can_make_way = True
    deadline = math.inf  # the loop ends a handshake that is late

    def __init__(self, client: ClientProtocol, context: ssl.SSLContext, connections: ClientConnections) -> None:
        self.address = ""
        self._client = client
        self._context = context
        self._connections = connections
        self._in_server = client.server_state.connections  # what uvicorn ends when it stops

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if not self._connections.add(self):
            self._connections.refused(Refusal.TOO_MANY_CONNECTIONS)
            transport.abort()
            return
        self._in_server.add(self)  # type: ignore[arg-type]
        self._client.end_handshake = self._end
        loop = asyncio.get_running_loop()
        is_over = loop.create_future()
        is_over.add_done_callback(self._is_over)
        tls = _ssl_protocol(loop)(
            loop,
            self._client,
            self._context,
            is_over,
            server_side=True,
            ssl_handshake_timeout=self._connections.limits.header_timeout_s,
        )
        transport.set_protocol(tls)
        tls.connection_made(transport)

    # ---- called by ClientConnections and uvicorn ----------------------------------------------------------------

    def make_way(self) -> None:
        self._transport.abort()

    def out_of_time(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """The listener has closed: the handshake, and a request after it, may still end in time."""
        self._connections.stop()
        self.deadline = self._connections.last_request_at

    def _is_over(self, outcome: asyncio.Future[None]) -> None:
        outcome.exception()  # clients that give up or speak no TLS are no news
        self._end()

    def _end(self) -> None:
        """Give the connection's place up, or to the client's protocol if the handshake is done. Idempotent."""
        self._connections.remove(self)
        self._in_server.discard(self)  # type: ignore[arg-type]


def tls_client_protocol(connections: ClientConnections, context: ssl.SSLContext) -> Any:
    """As `client_protocol`, with TLS. The server itself must be started without TLS."""

    def make(*arguments: Any, **named: Any) -> TlsHandshake:
        return TlsHandshake(ClientProtocol(*arguments, connections=connections, **named), context, connections)

    return make


def _ssl_protocol(loop: asyncio.AbstractEventLoop) -> Any:
    """The event loop's TLS protocol. `start_tls` would lose bytes that arrive before its task's first step."""
    return uvloop.loop.SSLProtocol if isinstance(loop, uvloop.Loop) else asyncio.sslproto.SSLProtocol  # type: ignore[attr-defined]
