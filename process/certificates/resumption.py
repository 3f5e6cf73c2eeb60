"""TLS sessions that a client resumes: a new connection to a known peer costs both ends about half of a handshake.

Neither end signs or verifies a certificate then. The peer is the one whose certificate was verified before: only it
can read its ticket. A changed certificate file makes a new context (`contexts.Following`), which knows no session.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any

_LIFETIME_S = 600.0  # from the full handshake; what has expired or was withdrawn since is noticed after that
_MOST = 4096  # peers


class ResumingContext(ssl.SSLContext):
    """A client's context with the last session of each peer, by the name that its certificate was verified for.

    It offers a session to event loops only (`wrap_bio`); `remember` keeps one for the next connection.
    """

    _sessions: dict[str, tuple[ssl.SSLSession, float]]  # and when it began; the oldest first
    clock: Callable[[], float]

    def __new__(cls, protocol: int = ssl.PROTOCOL_TLS_CLIENT) -> ResumingContext:
        self = super().__new__(cls, protocol)
        self._sessions = {}
        self.clock = time.monotonic
        return self

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """As SSLContext's, with the session that is known for the name."""
        if session is None and isinstance(server_hostname, str):
            session = self._session_of(server_hostname)
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def remember(self, connection: ssl.SSLObject) -> None:
        """Keep the session of a connection that has read something: a ticket comes after the handshake.

        A resumed connection's is not kept, so no chain of resumptions outlives a session's time.
        """
        name, session = connection.server_hostname, connection.session
        if name is None or session is None or not session.has_ticket or connection.session_reused:
            return
        self._sessions.pop(name, None)
        self._sessions[name] = session, self.clock()
        if len(self._sessions) > _MOST:
            del self._sessions[next(iter(self._sessions))]

    def forget(self, name: str) -> None:
        """The next connection makes a full handshake."""
        self._sessions.pop(name, None)

    def _session_of(self, name: str) -> ssl.SSLSession | None:
        session, began_at = self._sessions.get(name, (None, 0.0))
        if session is not None and self.clock() - began_at > _LIFETIME_S:
            self.forget(name)
            return None
        return session


def remember_session(transport: Any) -> None:
    """Keep the session of a transport's connection, if its context resumes sessions."""
    connection = transport.get_extra_info("ssl_object")
    if connection is not None and isinstance(connection.context, ResumingContext):
        connection.context.remember(connection)
