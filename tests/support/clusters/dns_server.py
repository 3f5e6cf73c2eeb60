"""A small DNS server on loopback, over UDP and TCP, whose records and failures a test sets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """Answers for `records`, with NXDOMAIN for other names."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}  # (name, kind) -> data as in a zone file
        self.rcode = dns.rcode.NOERROR  # else every answer is this failure
        self.failing_kinds: set[str] = set()  # that are answered with SERVFAIL
        self.is_silent = False
        self.num_questions = 0
        self.num_by_tcp = 0
        self.port = 0
        self.answered = asyncio.Condition()

    @property
    def nameserver(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def set_addresses(self, name: str, addresses: Iterable[str]) -> None:
        """Set the A and AAAA records of a name; none: there is no such name."""
        self.records = {key: data for key, data in self.records.items() if key[0] != name}
        for kind, colons in (("A", False), ("AAAA", True)):
            if data := [each for each in addresses if (":" in each) is colons]:
                self.records[name, kind] = data

    async def questions(self, count: int) -> None:
        """Wait until it has been asked so many more questions."""
        until = self.num_questions + count
        async with asyncio.timeout(120), self.answered:
            await self.answered.wait_for(lambda: self.num_questions >= until)

    def answer(self, wire: bytes, *, by_tcp: bool) -> bytes | None:
        question = dns.message.from_wire(wire)
        asked = question.question[0]
        name, kind = str(asked.name).removesuffix("."), dns.rdatatype.to_text(asked.rdtype)
        response = dns.message.make_response(question)
        if kind in self.failing_kinds:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif self.rcode:
            response.set_rcode(self.rcode)
        elif data := self.records.get((name, kind)):
            response.answer.append(dns.rrset.from_text_list(asked.name, 5, "IN", kind, data))
        elif all(known != name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        sent = response.to_wire(max_size=65535)
        if not by_tcp and len(sent) > max(question.payload, 512):
            response.answer.clear()
            response.flags |= dns.flags.TC
            sent = response.to_wire()
        return None if self.is_silent else sent

    async def count(self) -> None:
        async with self.answered:
            self.num_questions += 1
            self.answered.notify_all()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._counts: set[asyncio.Task[None]] = set()

    def connection_made(self, transport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address) -> None:
        sent = self._server.answer(data, by_tcp=False)
        if sent is not None:
            self._transport.sendto(sent, address)
        count = asyncio.ensure_future(self._server.count())
        self._counts.add(count)
        count.add_done_callback(self._counts.discard)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    """A running server without records."""
    server = DnsServer()

    async def serve_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        if (sent := server.answer(wire, by_tcp=True)) is not None:
            server.num_by_tcp += 1
            writer.write(len(sent).to_bytes(2, "big") + sent)
            await writer.drain()
        writer.close()

    tcp = await asyncio.start_server(serve_tcp, "127.0.0.1", 0)
    server.port = tcp.sockets[0].getsockname()[1]
    udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Udp(server), local_addr=("127.0.0.1", server.port)
    )
    try:
        yield server
    finally:
        udp.close()
        tcp.close()
        await tcp.wait_closed()
