"""Connections of clients before and after their TLS handshake count alike: limits, deadlines, making way."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from support.http.listener import LAST_GET, listening, until, until_closed

PATIENT = {"header_timeout_s": 600}
NOT_ALL_OF_A_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # a record of 512 bytes begins
ALERT_OF_TLS_1_2 = b"\x15\x03\x03"
LAST_WAIT = b"GET /wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_connections_count_from_the_start_and_harm_nobody(tmp_path: Path):
    async with listening(
        tmp_path, **PATIENT
    ) as listener:  # which does not wait, when it stops, for those that are left
        opened = [listener.connected(first) for first in (b"", NOT_ALL_OF_A_HELLO) * 5]
        await until(lambda: len(listener.connections) == 10)
        assert (await listener.ask(LAST_GET)).endswith(b"\r\n\r\n/")
        await until(lambda: len(listener.connections) == 10)
        await until_closed(listener.connected(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))  # no TLS
        opened.pop().close()
        await until(lambda: len(listener.connections) == 9)


async def test_silent_and_half_sent_handshakes_are_closed_in_time(tmp_path: Path):
    async with listening(tmp_path, header_timeout_s=0.5) as listener:
        opened = [listener.connected(first) for first in (b"", NOT_ALL_OF_A_HELLO) * 5]
        await asyncio.gather(*map(until_closed, opened))  # the loop's own limit is a minute, twice this one's
        await until(lambda: not len(listener.connections))


@pytest.mark.parametrize("limit", ["max_connections", "max_connections_per_address"])
async def test_handshakes_make_way_for_others_and_requests_do_not(tmp_path: Path, limit: str):
    async with listening(tmp_path, **PATIENT, **{limit: 4}) as listener:
        pending = [listener.connected(first) for first in (b"", NOT_ALL_OF_A_HELLO) * 2]
        await until(lambda: len(listener.connections) == 4)
        pending.append(listener.connected())
        assert await until_closed(pending.pop(0)) == b""  # the oldest, at once
        assert len(listener.connections) == 4
        asked = [asyncio.create_task(listener.ask(LAST_WAIT)) for _ in range(4)]
        await until(lambda: len(listener.seen) == 4)
        for each in pending:
            assert await until_closed(each) == b""
        assert listener.refused == []
        assert await until_closed(listener.connected()) == b""
        assert listener.refused == ["too_many_connections"]
        assert len(listener.connections) == 4
        listener.may_answer.set()
        assert all(answer.endswith(b"/wait") for answer in await asyncio.gather(*asked))


async def test_an_idle_client_cannot_keep_the_connection_that_has_to_make_way(tmp_path: Path):
    """It is closed without the alert whose answer the end of TLS would wait for."""
    async with listening(tmp_path, **PATIENT, max_connections=1) as listener:
        listener.trusting.maximum_version = ssl.TLSVersion.TLSv1_2  # where alerts can be told from data
        opened = listener.connected()
        opened.setblocking(True)
        secured = await asyncio.to_thread(listener.trusting.wrap_socket, opened)
        idle = listener.stack.enter_context(socket.socket(fileno=secured.detach()))
        idle.setblocking(False)
        assert (await listener.ask(LAST_GET)).endswith(b"\r\n\r\n/")
        assert ALERT_OF_TLS_1_2 not in await until_closed(idle)
