"""Where requests begin and end by h11, which shares no code with the parser that the router uses."""

import re
from dataclasses import dataclass

import h11

_MOST_BYTES = 2**20  # of the headers of one request
_FIRST_LINE = re.compile(rb"\A(\S+) +(\S+) +(HTTP/\S+\r\n)")


@dataclass(frozen=True, slots=True)
class Message:
    """One whole request."""

    method: str
    target: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Framing:
    """The whole requests of one connection, and the offset behind each."""

    messages: list[Message]
    ends: list[int]


def framing_of(stream: bytes) -> Framing:
    """What a server reads from a connection until it has to close it, or meets a fault or the end of what arrived."""
    messages: list[Message] = []
    ends: list[int] = []
    rest, is_last = stream, False
    while not is_last:
        # h11 refuses empty lines before a request, which RFC 9112, 2.2, wants ignored, and more than one blank in its
        # first line, which section 3 allows.
        rest = _FIRST_LINE.sub(rb"\1 \2 \3", rest.lstrip(b"\r\n"), count=1)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MOST_BYTES)
        connection.receive_data(rest)
        try:
            request = connection.next_event()
            if not isinstance(request, h11.Request) or request.method == b"PRI":  # HTTP/2's, by which no request begins
                break
            body = bytearray()
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
        except h11.RemoteProtocolError:
            break
        if not isinstance(event, h11.EndOfMessage):
            break
        messages.append(Message(request.method.decode(), request.target.decode(), bytes(body)))
        rest = connection.trailing_data[0]
        ends.append(len(stream) - len(rest))
        is_last = connection.their_state is not h11.DONE  # it closes, or offers another protocol
    return Framing(messages, ends)
