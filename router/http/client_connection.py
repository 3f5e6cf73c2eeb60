"""A client's connection: uvicorn's protocol, which reads the requests, within limits."""

import asyncio
import fcntl
import math
import struct
import termios
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.connections import ClientConnection, ClientConnections, Refusal

SCOPE_KEY = "prelude.client"  # in the ASGI scope: the request's ClientConnection
_LINGER_S = 2.0  # for a client to read why it was refused
_LEAST_READ_BYTES = 64 * 1024  # of an answer, within read_timeout_s


class _Stop(Exception):
    """Raised in the parser's callbacks to end the parsing of a connection."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why.name)
        self.why = why


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, within limits. Gives each request its ClientConnection in the scope."""

    answering: ClientConnection | None = None  # the request whose answer is being made; later ones of a pipeline wait
    end_handshake: Callable[[], None] | None = None  # with TLS: frees the place that the handshake had until now

    def __init__(self, *arguments: Any, connections: ClientConnections | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Strict: uvicorn's parser swallows without a word what follows a `close`, even one in a trailer.
        self.parser = httptools.HttpRequestParser(self)
        self.address = ""
        self.deadline = math.inf
        self._connections = ClientConnections() if connections is None else connections
        self._limits = self._connections.limits
        self._is_refused = False  # no more is read; the connection is closed when what was begun is answered
        self._in_headers = self._in_body = False  # of the request that is being parsed
        # By the loop's clock, when its headers began, the last of its body arrived, the client stopped reading, and the
        # answer to a refusal was sent.
        self._header_at = self._body_at = self._paused_at = self._refused_at = 0.0
        self._idle_at = 0.0  # when the last answer was complete
        self._num_framing_bytes = self._num_body_bytes = 0  # of that request
        self._num_unanswered = 0  # requests with complete headers
        self._paused_bytes = 0  # that were left for the client when it was last seen reading

    @property
    def can_make_way(self) -> bool:
        """True if the connection is idle: all requests are answered, and no other one is complete enough to be."""
        return not self._num_unanswered and not self._in_body and not self.transport.get_write_buffer_size()

    @property
    def _has_read_last(self) -> bool:
        """True after a request behind which the connection closes. What follows is not read: it may be no request."""
        is_between = not self._in_headers and not self._in_body
        return is_between and self.cycle is not None and not self.cycle.keep_alive

    # ---- asyncio's callbacks ------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self.end_handshake is not None:
            self.end_handshake()
            self.end_handshake = None
        if not self._connections.add(self):
            self._refuse(Refusal.TOO_MANY_CONNECTIONS)
            return
        self._header_at = self.loop.time()
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        # With TLS, what had arrived before the transport closed still comes.
        if self._is_refused or self._has_read_last or self.transport.is_closing():
            return
        num_body_bytes = self._num_body_bytes
        self._num_framing_bytes += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as pause:
                self._parse_without_upgrade(data[pause.args[0] :])
        except httptools.HttpParserError as error:
            if not self._has_read_last:
                why = error.__context__
                self._refuse(why.why if isinstance(why, _Stop) else Refusal.MALFORMED)
                return
        if self._num_body_bytes != num_body_bytes and not self.cycle.response_complete:
            self._body_at = self.loop.time()
        # Parts of a header, and what frames a body, reach no callback before they are complete.
        if self._in_headers or self._in_body:
            allowed = self._limits.max_header_bytes + (16 * self._num_body_bytes if self._in_body else 0)
            has_too_many = self._in_headers and len(self.headers) > self._limits.max_headers
            if has_too_many or self._num_framing_bytes - self._num_body_bytes > allowed:
                self._refuse(Refusal.HEADERS_TOO_LARGE)
                return
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)
        if self.answering is not None:
            self.answering.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused_at, self._paused_bytes = self.loop.time(), self.transport.get_write_buffer_size()
        self._set_deadline()
        if self.answering is not None:
            self.answering.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_deadline()
        if self.answering is not None:
            self.answering.resume()

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Read a message again whose headers ask for an Upgrade, then the bytes behind its headers.

        llhttp takes them for another protocol, and skips the body. RFC 9110, 7.8, lets a server ignore the header, and
        then the body is framed as any other: a new parser reads the message, less the `connection` that makes it one.
        """
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"connection"]
        start = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (*start, b"".join(lines)))
        self.parser.feed_data(rest)

    # ---- the parser's callbacks ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._has_read_last:
            raise _Stop(Refusal.MALFORMED)  # is not sent
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise _Stop(Refusal.TOO_MANY_PIPELINED)
        super().on_message_begin()
        self._in_headers = True
        self._header_at = self.loop.time()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_target_bytes:
            raise _Stop(Refusal.TARGET_TOO_LONG)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Called for every header of every request; limits are checked once, and after each read.
        if self._in_headers:  # after the body they would join the headers that the request was judged by
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise _Stop(Refusal.MALFORMED)
            return  # the message is read again
        headers, limits = self.headers, self._limits
        num_bytes, num_hosts, num_encodings, has_upgrade = len(self.url), 0, 0, False
        for name, value in headers:
            num_bytes += len(name) + len(value)
            if name == b"host":
                num_hosts += 1
            elif name == b"transfer-encoding":
                num_encodings += 1 if value.strip().lower() == b"chunked" else 2
            elif name == b"upgrade":
                has_upgrade = True
            elif name == b"expect" and value.lower() == b"100-continue":  # as uvicorn has it
                self.expect_100_continue = True
        if num_bytes > limits.max_header_bytes or len(headers) > limits.max_headers:
            raise _Stop(Refusal.HEADERS_TOO_LARGE)
        version = self.parser.get_http_version()
        if (
            version not in ("1.1", "1.0") or num_encodings > (version == "1.1") or b"#" in self.url
        ):  # 1.0 encodes nothing
            raise _Stop(Refusal.MALFORMED)
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise _Stop(Refusal.NOT_ONE_HOST)
        self._in_headers = False
        self._num_framing_bytes = self._num_body_bytes = 0
        connection = ClientConnection(self)
        self.scope[SCOPE_KEY] = connection  # type: ignore[literal-required]
        super().on_headers_complete()  # starts the request's task, which runs later
        connection.cycle = self.cycle
        # Behind an Upgrade, a proxy may have passed on no body, or have opened a tunnel.
        if self._connections.is_stopping or has_upgrade:
            self.cycle.keep_alive = False
        self._in_body, self._body_at = True, self.loop.time()
        self._num_unanswered += 1

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_headers:
            return  # of an Upgrade, whose message is read again
        self._in_body = False
        self._num_framing_bytes = self._num_body_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Replaces uvicorn's method, which starts a timer per idle connection. Here, a periodic sweep closes them."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._idle_at = self.loop.time()
        self._num_unanswered -= 1
        if self._is_refused and not self._num_unanswered:
            self.transport.close()
        elif self._in_body:  # the rest of a body that nobody reads; it has one more gap
            self._body_at = self.loop.time()
        self._set_deadline()

    # ---- called by ClientConnections and uvicorn ----------------------------------------------------------------

    def shutdown(self) -> None:
        """The listener has closed. Close this connection too, unless a request is under way or may be on its way."""
        self._connections.stop()
        is_idle = self.cycle is not None and not self._num_unanswered and not self._in_headers
        if is_idle and not _num_unread_bytes(self.transport):
            self.transport.close()
            return
        if self._num_unanswered:
            self.cycle.keep_alive = False
        self._set_deadline()

    def out_of_time(self) -> None:
        """The deadline has passed: close the connection, with an answer if a request has begun and none was sent."""
        now = self.loop.time()
        if self._in_body and self.flow.read_paused:
            self._body_at = now  # the client waits for us
        if self.flow.write_paused:
            left = self.transport.get_write_buffer_size()
            if left <= self._paused_bytes - _LEAST_READ_BYTES:  # it reads
                self._paused_at, self._paused_bytes = now, left
        self._set_deadline()
        if self.deadline > now:
            return
        self.deadline = math.inf
        if self._is_refused or self.flow.write_paused:
            self.transport.abort()
        elif self._in_headers:
            self._refuse(Refusal.HEADERS_TOO_SLOW)
        elif self._in_body:
            self._refuse(Refusal.BODY_TOO_SLOW)
        elif self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait for a client that does not read
        else:
            self.transport.close()

    def make_way(self) -> None:
        """Close this connection in favour of a new one. With TLS, `close` would wait for the client's own close."""
        self.transport.abort()

    def _set_deadline(self) -> None:
        limits = self._limits
        if self._is_refused:
            self.deadline = self._refused_at + _LINGER_S
        elif self.flow.write_paused:
            self.deadline = self._paused_at + limits.read_timeout_s
        elif self._in_headers:
            self.deadline = self._header_at + limits.header_timeout_s
        elif self._in_body:
            self.deadline = self._body_at + limits.body_gap_timeout_s
        elif self.cycle is None:  # it has sent nothing yet
            self.deadline = self._header_at + limits.header_timeout_s
        elif self._num_unanswered:
            self.deadline = math.inf
        else:
            self.deadline = self._idle_at + limits.idle_timeout_s
        if not self._num_unanswered and not self._is_refused:
            self.deadline = min(self.deadline, self._connections.last_request_at)

    def _refuse(self, why: Refusal) -> None:
        """Stop reading. Answers that have begun are finished; if there are none, the client gets an error answer."""
        self._is_refused, self._refused_at = True, math.inf
        self.deadline = math.inf
        self._connections.refused(why)
        if self._in_body:
            if self.pipeline:  # it waits for those before it
                self.pipeline.popleft()
                self._num_unanswered -= 1
            elif self.cycle.response_complete:
                self.transport.close()
                return
            elif self.cycle.response_started:
                self.transport.abort()
                return
            else:
                self._num_unanswered = 0
                self.cycle.disconnected = True  # its application must not answer, too
                self.cycle.message_event.set()
        if self._num_unanswered:
            return  # `on_response_complete` closes the connection
        self.transport.write(why.answer)
        if self.transport.can_write_eof() and why is not Refusal.TOO_MANY_CONNECTIONS:
            # With a close now, what the client still sends would make its system drop the answer.
            self.transport.write_eof()
            self._refused_at = self.loop.time()
            self._set_deadline()
        else:
            self.transport.close()


def _num_unread_bytes(transport: asyncio.Transport) -> int:
    """What the client has sent and the event loop has not read."""
    opened = transport.get_extra_info("socket")
    if opened is None or opened.fileno() < 0:
        return 0
    return int(struct.unpack("i", fcntl.ioctl(opened.fileno(), termios.FIONREAD, bytes(4)))[0])


def client_protocol(connections: ClientConnections) -> Any:
    """The protocol class of a listener with these connections, as uvicorn takes it."""
    return partial(ClientProtocol, connections=connections)
