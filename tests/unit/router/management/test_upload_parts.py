"""Uploads that are not sound: they fill neither the log nor memory."""

from __future__ import annotations

from typing import Any

import pytest

from router.errors import InvalidUpload
from router.management.upload import received_upload
from router.management.upload_receiver import Upload, UploadReceiver

_BEGIN = b'--x\r\nContent-Disposition: form-data; name="name"'


@pytest.mark.parametrize("body", [b"nonsense", _BEGIN + b"\r\nX", b"--x\r\n: \r\n", b"--x--\r\n", b"--xx"])
async def test_they_are_in_no_log(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The parser warns of most of them: a client could fill the log with lines."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = {b"content-type": b"multipart/form-data; boundary=x"}
    limits = {"max_bytes": 10_000, "gap_timeout_s": 60.0, "timeout_s": 60.0}
    with pytest.raises(InvalidUpload):
        async with received_upload(headers, receive, fields=("name",), **limits):
            pass
    assert not caplog.records


@pytest.mark.parametrize("part", ["on_header_field", "on_header_value"])
def test_a_header_of_a_part_is_bounded_whatever_the_parser_does(part: str) -> None:
    take = UploadReceiver(Upload(), ("name",), None).callbacks[part]
    take(bytes(8192), 0, 8192)
    with pytest.raises(InvalidUpload, match="over 8192 bytes"):
        take(b"x", 0, 1)
