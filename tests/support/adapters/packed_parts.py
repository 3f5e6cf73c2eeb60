"""A packed file taken apart and put together again."""

import json
import struct


def parts_of(data: bytes) -> tuple[dict, bytes]:
    begin = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:begin]), data[begin:]


def joined(header: dict, tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + tensors
