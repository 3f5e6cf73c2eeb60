"""Bytes of connections: requests with what frames a body, right or wrong, and with faults anywhere."""

from random import Random

_FAULTS = b'\r|\n|\r\n|\0| |\t|:|;|,|0|9|-|"|\x0b|\x7f|\x80'.split(b"|")
_METHODS = b"GET POST PUT DELETE PATCH HEAD OPTIONS TRACE CONNECT PRI FOO get".split()
_TARGETS = [b"/", b"/v1/chat/completions", b"/a?b=c&d=%20", b"*", b"http://x/a", b"x:1", b"//a", b"/a#b", b"/%00", b"?"]
_CONNECTIONS = [
    b"close", b"keep-alive", b"Close", b"upgrade", b"keep-alive, Upgrade", b"upgrade, close", b"close,x", b"x ,\tclose",
    b"keep-alive, close", b"xclose", b"close;", b"", b",", b"transfer-encoding", b"content-length", b"closed",
    b"close close",
]  # fmt: skip
_LENGTHS = b"%d| %d|%d |\t%d\t|0%d|+%d|-%d|%d, %d|%d,%d|0x%d|%d_0|%d.0||%d %d".split(b"|")
_ENCODINGS = [
    b"chunked", b"Chunked", b"\tchunked ", b"chunked\t", b"chunked,", b",chunked", b"gzip, chunked", b"identity", b"",
    b"chunked, chunked", b"chunked, identity", b"xchunked", b"chunked x", b"chunked;a=b", b"\x0bchunked",
]  # fmt: skip
_OTHERS = [
    b"upgrade: h2c", b"Upgrade: websocket", b"upgrade:", b"expect: 100-continue", b"te: trailers", b"trailer: x", b"x:",
    b"x: \x80\xff", b"x-content-length: 4", b" x: folded", b"x : a", b"x", b": a", b"host: y", b"keep-alive: timeout=5",
    b"x: a\tb", b'x: "a\\"', b"proxy-connection: close", b"http2-settings: AAMAAABk", b"content-length : 4", b"x\t: a",
]  # fmt: skip
_LINE_ENDS = [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b" \r\n"]


def random_stream(random: Random) -> tuple[bytes, bool]:
    """What one client sends, and whether it is right: each of its requests must be served."""
    is_right = random.random() < 0.4
    requests = [_request(random, is_right) for _ in range(random.randint(1, 3))]
    stream = b"".join(requests)
    if not is_right and random.random() < 0.6:
        for _ in range(random.randint(1, 3)):
            stream = _with_fault(random, stream)
    elif is_right and random.random() < 0.2:
        stream = stream[: random.randrange(len(stream))]
    return stream, is_right


def random_pieces(random: Random, stream: bytes) -> list[bytes]:
    """The stream in pieces as they may arrive: of one byte, few, or many."""
    if random.random() < 0.3:
        return [stream[at : at + 1] for at in range(len(stream))]
    cuts = sorted(random.randrange(len(stream) + 1) for _ in range(random.choice((0, 1, 2, 5, 20))))
    return [piece for piece in map(stream.__getitem__, map(slice, [0, *cuts], [*cuts, None])) if piece]


def _request(random: Random, is_right: bool) -> bytes:
    pick, odds = random.choice, random.random
    body = _body(random)
    method, target, version = pick(_METHODS[:8]), pick(_TARGETS[:3]), b"1.1"
    if not is_right:
        method, target = pick(_METHODS), pick(_TARGETS)
        version = pick((b"1.1", b"1.1", b"1.1", b"1.0", b"1.0", b"0.9", b"2.0", b"1.2", b"01.1", b"1"))
    elif odds() < 0.2:
        version = b"1.0"
    lines = [b"Host: x"] if is_right or odds() < 0.95 else []
    if odds() < (0.15 if is_right else 0.4):
        lines.append(b"Connection: " + pick(_CONNECTIONS[:6] if is_right else _CONNECTIONS))
    if odds() < 0.2:
        lines += [b"connection: upgrade", b"upgrade: h2c"]
    num_framings = 1 if is_right else pick((0, 1, 1, 1, 2))
    for _ in range(num_framings):
        if odds() < 0.5 and (version == b"1.1" or not is_right):
            encoding = pick(_ENCODINGS[:3]) if is_right or odds() < 0.5 else pick(_ENCODINGS)
            lines.append(b"Transfer-Encoding: " + encoding)
            sent = _chunks(random, body, is_right)
        else:
            form = pick(_LENGTHS[:5]) if is_right or odds() < 0.5 else pick(_LENGTHS)
            lines.append(b"Content-Length: " + form % ((len(body),) * form.count(b"%d")))
            sent = body
    if not num_framings:
        sent = pick((b"", body))
    if not is_right:
        lines += [pick(_OTHERS) for _ in range(pick((0, 0, 1, 2)))]
        if odds() < 0.05:
            lines += lines
    random.shuffle(lines)
    start = b"%b %b HTTP/%b" % (method, target, version)
    ends = [b"\r\n" if is_right or odds() < 0.99 else pick(_LINE_ENDS) for _ in range(len(lines) + 2)]
    before = b"\r\n" if odds() < 0.05 else b""
    return before + b"".join(line + end for line, end in zip([start, *lines, b""], ends, strict=True)) + sent


def _body(random: Random) -> bytes:
    smuggled = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    return random.choice((b"", b"a", smuggled, smuggled * 2, b"0\r\n\r\n" + smuggled, random.randbytes(20), b"\r\n"))


def _chunks(random: Random, body: bytes, is_right: bool) -> bytes:
    cuts = sorted(random.randrange(len(body) + 1) for _ in range(random.randint(0, 2)))
    parts = [part for part in map(body.__getitem__, map(slice, [0, *cuts], [*cuts, None])) if part]
    sizes = [b"%x", b"%X", b"00%x", b"%x;a=b", b'%x;a="b"', b"%x;a"]
    trailers = [b"", b"", b"x: a\r\n", b"upgrade: a\r\nconnection: upgrade\r\n", b"host: y\r\n"]
    end = b"\r\n"
    if not is_right:
        sizes += b'0x%x|-%x|+%x| %x|%x |%x ;a|%x;|%x;\n|%x;a="|%xg|%x\t|1%016x'.split(b"|")
        trailers += [b"connection: close\r\n", b"content-length: 4\r\n", b"transfer-encoding: chunked\r\n"]
        trailers += [b"x\r\n", b" x: a\r\n", b"x: a\n"]
        end = random.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"", b"a\r\n"))
    chunks = [random.choice(sizes) % len(part) + b"\r\n" + part + end for part in parts]
    return b"".join(chunks) + random.choice((b"0", b"000", b"0;a=b")) + b"\r\n" + random.choice(trailers) + b"\r\n"


def _with_fault(random: Random, stream: bytes) -> bytes:
    at = random.randrange(len(stream) + 1)
    to = min(len(stream), at + random.choice((1, 1, 1, 2, 8, 40)))
    part = random.choice((b"", random.choice(_FAULTS), random.choice(_FAULTS), stream[at:to] * 2, random.randbytes(1)))
    return stream[:at] + part + stream[random.choice((at, to)) :]
