"""Connections to engines resume TLS sessions: no certificate is verified again, and none that should be is skipped."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop
from support.clusters.certificates import authority, issued

from process.certificates.contexts import Following, make_client_context, make_server_context, server_context
from process.certificates.resumption import ResumingContext
from router.http.engine_connections import EngineConnection, EngineConnections

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
_HANG_S = 60


class Exchange:
    on_chunk: Callable[[bytes], None] | None = None

    def __init__(self, connection: EngineConnection) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = connection
        connection.send("/v1/completions", b"{}", self)

    def on_headers_complete(self) -> None: ...
    def on_body(self, data: bytes) -> None: ...

    def on_message_complete(self) -> None:
        self._connection.finish()
        self.ended.set_result(None)

    def on_broken(self, error: BaseException) -> None:
        self.ended.set_exception(error)


@dataclass
class Engine:
    """Serves on one port, by one context after the other. What it saw of each connection that sent a request."""

    port: int = 0
    resumed: list[bool] = field(default_factory=list)
    callers: list[str] = field(default_factory=list)  # common names
    server: asyncio.Server | None = None

    async def start(self, context: ssl.SSLContext) -> None:
        if self.server is not None:
            self.server.close()
            await self.server.wait_closed()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=context)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n{}"):
                tls = writer.get_extra_info("ssl_object")
                self.resumed.append(tls.session_reused)
                names = [value for kind, value in tls.getpeercert()["subjectAltName"] if kind == "DNS"]
                self.callers += names
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()


class Fixture:
    """A router's files, an engine, and its name."""

    def __init__(self, folder: Path) -> None:
        self.ca = authority(folder / "certs")
        self.router = issued(self.ca, "router", "r")
        self.decode = issued(self.ca, "decode", "d0")
        self.name = "d0.decode.prelude.local"
        self.engine = Engine()
        self.context = make_client_context(self.router)

    async def request(self, context: ssl.SSLContext | None = None) -> None:
        """One request on a new connection, which is closed after it."""
        connections = EngineConnections(connect_timeout_s=_HANG_S, idle_s=_HANG_S, most=9)
        url = f"https://127.0.0.1:{self.engine.port}"
        connection = await connections.connect(url, tls=lambda: (context or self.context, self.name))
        await Exchange(connection).ended
        connections.close()

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            await self.engine.start(make_server_context(self.decode))
            await asyncio.wait_for(test(), _HANG_S)

        uvloop.run(bounded())


@pytest.fixture
def tls(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path)


def test_the_next_connection_resumes_and_the_engine_still_knows_who_calls(tls: Fixture):
    async def test() -> None:
        for _ in range(3):
            await tls.request()
        assert tls.engine.resumed == [False, True, True]
        assert tls.engine.callers == ["r.router.prelude.local"] * 3

    tls.run(test)


def test_a_session_ends_ten_minutes_after_the_full_handshake(tls: Fixture):
    async def test() -> None:
        now = 0.0
        tls.context.clock = lambda: now
        for now in (0.0, 500.0, 601.0, 1100.0, 1300.0):  # noqa: B007 the clock reads it
            await tls.request()
        assert tls.engine.resumed == [False, True, False, True, False]

    tls.run(test)


def test_sessions_belong_to_a_name_and_to_the_files(tls: Fixture):
    """The certificate that is verified has the name; new files may have other authorities."""

    async def test() -> None:
        following = Following(tls.router, make_client_context)
        following._clock, following._looked_at = lambda: clock, 0.0
        clock = 0.0
        await tls.request(following.current())
        await tls.request(following.current())
        issued(tls.ca, "router", "r")  # in place of the files
        clock = 2.0
        await tls.request(following.current())
        assert tls.engine.resumed == [False, True, False]
        tls.name = "d1.decode.prelude.local"
        with pytest.raises(ssl.SSLCertVerificationError):
            await tls.request(following.current())

    tls.run(test)


def test_another_engine_at_the_same_address_must_prove_who_it_is(tls: Fixture):
    async def test() -> None:
        await tls.request()
        await tls.engine.start(make_server_context(issued(tls.ca, "decode", "d7")))
        with pytest.raises(ssl.SSLCertVerificationError):
            await tls.request()
        await tls.engine.start(make_server_context(tls.decode))
        await tls.request()
        await tls.request()
        assert tls.engine.resumed == [False, False, True]

    tls.run(test)


def test_an_engine_whose_certificate_was_renewed_resumes_and_then_shows_the_new_one(tls: Fixture):
    async def test() -> None:
        now = 0.0
        tls.context.clock = lambda: now
        following = Following(tls.decode, make_server_context)
        following._clock, following._looked_at = lambda: now, 0.0
        await tls.engine.start(server_context(following))
        await tls.request()
        issued(tls.ca, "decode", "d0")
        for now in (10.0, 700.0):  # noqa: B007
            await tls.request()
        assert tls.engine.resumed == [False, True, False]
        assert following.version == 1

    tls.run(test)


def test_the_number_of_sessions_is_bounded(tls: Fixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("process.certificates.resumption._MOST", 2)

    async def test() -> None:
        engines = {name: make_server_context(issued(tls.ca, "decode", name)) for name in ("a", "b", "c")}
        for name, context in engines.items():
            await tls.engine.start(context)
            tls.name = f"{name}.decode.prelude.local"
            await tls.request()
        assert isinstance(tls.context, ResumingContext)
        assert list(tls.context._sessions) == ["b.decode.prelude.local", "c.decode.prelude.local"]

    tls.run(test)


def test_a_caller_without_a_certificate_gets_no_session(tls: Fixture):
    async def test() -> None:
        anonymous = ResumingContext()
        anonymous.load_verify_locations(tls.router.ca)
        for _ in range(2):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await tls.request(anonymous)
        assert not anonymous._sessions
        assert not tls.engine.resumed

    tls.run(test)
