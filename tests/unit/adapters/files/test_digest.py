"""Digests that threads make are those of the definition, and cover every byte."""

import hashlib
import random

import pytest

from adapters.files.digest import Digest, sha256_of_chunks

MIB = 1024**2


@pytest.mark.parametrize("num_bytes", [0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 20 * MIB])
def test_chunks(num_bytes: int):
    content = bytearray(random.Random(num_bytes).randbytes(num_bytes))
    seen = {}
    digest = sha256_of_chunks(memoryview(content), lambda at, chunk: seen.update({at: bytes(chunk)}))
    chunks = [bytes(content[begin : begin + 8 * MIB]) for begin in range(0, num_bytes, 8 * MIB)]
    assert [seen[at] for at in sorted(seen)] == chunks
    assert digest == hashlib.sha256(b"".join(hashlib.sha256(chunk).digest() for chunk in chunks)).hexdigest()
    for at in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
        content[at] ^= 1
        assert sha256_of_chunks(memoryview(content)) != digest
        content[at] ^= 1


def test_what_is_called_with_a_chunk_may_fail():
    def full(_at: int, _chunk: memoryview) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        sha256_of_chunks(memoryview(b"x"), full)


def test_parts():
    with Digest() as digest:
        for part in (b"a" * MIB, memoryview(b"b" * 3), b""):
            digest.update(part)
        assert digest.hexdigest() == hashlib.sha256(b"a" * MIB + b"bbb").hexdigest()
