"""Random bytes in random pieces: the requests that the router takes from a connection are those that h11 sees."""

import asyncio
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import uvicorn
from starlette.requests import ClientDisconnect, Request
from support.http.random_streams import random_pieces, random_stream
from support.http.reference_framing import Framing, Message, framing_of
from uvicorn.server import ServerState

from router.http.client_connection import SCOPE_KEY, ClientProtocol
from router.http.connections import ClientConnections


class Client(asyncio.Transport):
    """The transport of a client that reads at once."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.is_paused = False
        self._is_closing = False
        self.protocol: Any = None

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: Any) -> None: ...
    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close


@dataclass
class Outcome:
    """What the router has made of one connection."""

    messages: list[Message] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # by the bytes that it had received
    is_open: bool = True


class Router:
    """The router's side of connections, with an application that notes each whole request."""

    def __init__(self, random: Random) -> None:
        self._random = random
        quiet = {"log_config": None, "access_log": False, "proxy_headers": False}
        self._config = uvicorn.Config(self.app, interface="asgi3", ws="none", lifespan="off", **quiet)
        self._config.load()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        scope["state"]["outcome"].messages.append(Message(scope["method"], scope["target"].decode(), body))
        for _ in range(self._random.choice((0, 0, 3))):
            await asyncio.sleep(0)
        scope[SCOPE_KEY].whole(200, b"", {})

    async def read(self, pieces: list[bytes]) -> Outcome:
        """Let a new connection bring the pieces one by one."""
        outcome, transport = Outcome(), Client()

        class Noting(ClientProtocol):
            def on_headers_complete(self) -> None:
                self.scope["target"] = self.url
                super().on_headers_complete()

            def on_message_complete(self) -> None:
                was_in_body = self._in_body
                super().on_message_complete()
                if was_in_body and not self._in_body:
                    outcome.ends.append(num_bytes)

        protocol = Noting(self._config, ServerState(), {"outcome": outcome}, connections=ClientConnections())
        transport.protocol, num_bytes = protocol, 0
        protocol.connection_made(transport)
        for piece in pieces:
            while transport.is_paused and not transport.is_closing():  # noqa: ASYNC110
                await asyncio.sleep(0)
            if transport.is_closing():
                break
            num_bytes += len(piece)
            protocol.data_received(piece)
            for _ in range(self._random.choice((0, 0, 0, 1, 3, 8))):
                await asyncio.sleep(0)
        while protocol._num_unanswered > protocol._in_body and not transport.is_closing():  # noqa: ASYNC110
            await asyncio.sleep(0)
        outcome.is_open = not transport.is_closing() and not protocol._is_refused
        transport.close()
        await asyncio.sleep(0)
        return outcome


def differences(outcome: Outcome, expected: Framing, pieces: list[bytes], is_right: bool) -> list[str]:
    found = []
    if outcome.messages != expected.messages[: len(outcome.messages)]:
        found.append("another message")
    if len(outcome.messages) < len(expected.messages) and (is_right or outcome.is_open):
        found.append("a message is missing")
    if all(len(piece) == 1 for piece in pieces) and outcome.ends != expected.ends[: len(outcome.ends)]:
        found.append("another end")
    return found


MANY = pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])  # four minutes on one busy core


@pytest.mark.parametrize("num_cases", [2000, MANY])
async def test_random_connections(num_cases: int) -> None:
    seed = Random().randrange(2**32)
    print(f"seed {seed}")
    random = Random(seed)
    router, num_accepted, num_expected = Router(random), 0, 0
    for number in range(num_cases):
        stream, is_right = random_stream(random)
        pieces, expected = random_pieces(random, stream), framing_of(stream)
        outcome = await asyncio.wait_for(router.read(pieces), 120)
        found = differences(outcome, expected, pieces, is_right)
        assert not found, (
            f"case {number}: {found}: {stream!r}\nin {len(pieces)} pieces\nrouter {outcome}\nh11 {expected}"
        )
        num_accepted += len(outcome.messages)
        num_expected += len(expected.messages)
    print(f"{num_accepted} requests accepted of {num_expected} that h11 accepts, in {num_cases} streams")
    assert num_accepted > 0.7 * num_expected > 0.4 * num_cases
