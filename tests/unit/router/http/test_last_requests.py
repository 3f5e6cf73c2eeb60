"""A router that stops answers clients that connected before: accepted or not, with a request or about to send one."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from support.http.listener import ENOUGH_S, GET, Listener, listening, until, until_closed


async def accepted(listener: Listener, count: int = 1) -> list[socket.socket]:
    found = [listener.connected() for _ in range(count)]
    await until(lambda: len(listener.server.server_state.connections) >= count)
    return found


def is_last_answer(data: bytes) -> bool:
    return data.startswith(b"HTTP/1.1 200") and b"connection: close" in data and data.endswith(b"/")


async def test_connections_that_wait_to_be_accepted_are_answered():
    async with listening() as listener:
        opened = [listener.connected(GET) for _ in range(5)]
        address = listener.bound.getsockname()
        await listener.stop()  # begins at once, before the event loop runs again
        assert all(map(is_last_answer, await asyncio.gather(*map(until_closed, opened))))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


async def test_no_connection_is_made_that_would_not_be_accepted():
    """Who comes between the last look and the close is refused, and may go elsewhere; a reset would lose a request."""
    async with listening() as listener, asyncio.timeout(ENOUGH_S):
        loop, late = asyncio.get_running_loop(), listener.stack.enter_context(socket.socket())
        late.setblocking(False)

        class Bound(socket.socket):
            def accept(self) -> tuple[socket.socket, str]:
                try:
                    return super().accept()
                except BlockingIOError:
                    late.connect_ex(self.getsockname())
                    raise

        listener.bound = Bound(fileno=os.dup(listener.bound.fileno()))
        address = listener.bound.getsockname()
        await listener.stop()
        with pytest.raises(ConnectionRefusedError):
            await loop.sock_connect(late, address)


async def test_a_connection_whose_client_is_far_away_is_answered():
    """The last part of its handshake comes after the signal, here as the system waits for the request as well."""
    async with listening() as listener:
        listener.bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
        opened = listener.connected()
        stopping = asyncio.create_task(listener.stop())
        await asyncio.sleep(0)  # it has begun
        opened.send(GET)
        assert is_last_answer(await until_closed(opened))
        await stopping


async def test_a_new_connection_may_still_send_its_request():
    async with listening() as listener:
        opened, unread, silent = await accepted(listener, 3)
        stopping = asyncio.create_task(listener.stop())
        unread.send(GET)
        await asyncio.sleep(0.3)
        opened.send(GET)
        assert is_last_answer(await until_closed(opened))
        assert is_last_answer(await until_closed(unread))
        assert await until_closed(silent) == b""
        await stopping


@pytest.mark.parametrize("sends", [False, True])
async def test_an_idle_connection_is_closed_unless_a_request_has_come(sends: bool):
    async with listening() as listener:
        (opened,) = await accepted(listener)
        opened.send(GET)
        first = await asyncio.get_running_loop().sock_recv(opened, 65536)
        assert b"200" in first
        assert b"connection: close" not in first
        if sends:
            opened.send(GET)  # the event loop has not read it when the router stops
        await listener.stop()
        last = await until_closed(opened)
        assert is_last_answer(last) if sends else last == b""


async def test_a_handshake_that_has_begun_and_its_request_are_served(tmp_path: Path):
    async with listening(tmp_path) as listener:
        begun, silent = await accepted(listener, 2)
        stopping = asyncio.create_task(listener.stop())
        await asyncio.sleep(0.2)
        reader, writer = await asyncio.open_connection(sock=begun, ssl=listener.trusting, server_hostname="127.0.0.1")
        writer.write(GET)
        assert is_last_answer(await reader.read())
        writer.close()
        assert await until_closed(silent) == b""
        await stopping
