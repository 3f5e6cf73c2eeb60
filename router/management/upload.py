"""Receives an adapter's files as multipart/form-data and streams them into a folder."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from adapters.store.errors import StoreFull
from process.exhaustion import is_disk_full
from router.errors import BodyTooLarge, BodyTooSlow, InvalidUpload
from router.management.upload_receiver import FILE_FIELDS, FOLDER, Upload, UploadReceiver
from router.protocol.request_body import ClientGone

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each upload that is not sound

MIN_BYTES_PER_S = 64 * 1024  # slower uploads would hold their slots for long


@asynccontextmanager
async def received_upload(
    headers: Mapping[bytes, bytes],
    receive: Any,
    *,
    fields: tuple[str, ...],
    memory_field: str | None = None,
    max_bytes: int,
    gap_timeout_s: float,
    timeout_s: float,
    on_field: Callable[[str, str], None] | None = None,
) -> AsyncIterator[Upload]:
    """Receive a whole upload and keep it inside the block. `fields` are allowed besides files.

    `on_field` is called with each complete field and its value; an error in it ends the upload. Waiting for the client
    may take `gap_timeout_s` in all, plus a second for every `MIN_BYTES_PER_S` bytes received.

    If the field `memory_field`, which must precede the files, is "true", files are kept in shared memory, not on disk.

    Raises InvalidUpload, InvalidField, BodyTooLarge, BodyTooSlow, StoreFull and ClientGone. Removes all files at the
    end, also after an error.
    """
    boundary = _boundary_of(headers)
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    upload = Upload()
    try:
        receiver = UploadReceiver(upload, fields, memory_field, on_field)
        try:
            async with asyncio.timeout(timeout_s):
                await _receive(receiver, boundary, receive, max_bytes, gap_timeout_s)
        except TimeoutError:
            raise BodyTooSlow(
                f"the upload was not complete within {timeout_s:g} s, or over {gap_timeout_s:g} s were spent on "
                f"waiting for less than {MIN_BYTES_PER_S // 1024} KiB a second"
            ) from None
        except OSError as error:
            if is_disk_full(error):
                raise StoreFull("the router has no room for the upload; try again later") from error
            raise
        finally:
            receiver.close()
        if not upload.file_names and FOLDER not in upload.fields:
            raise InvalidUpload(f"the upload has no files; send the adapter's files as {FILE_FIELDS[0]!r}")
        yield upload
    finally:
        if upload.work_folder is not None:
            await asyncio.shield(asyncio.to_thread(upload.work_folder.close))


async def _receive(
    receiver: UploadReceiver, boundary: bytes, receive: Any, max_bytes: int, gap_timeout_s: float
) -> None:
    parser = MultipartParser(boundary, receiver.callbacks)
    num_bytes, waited_s = 0, 0.0  # not for our own disk
    while True:
        left_s = gap_timeout_s + num_bytes / MIN_BYTES_PER_S - waited_s
        began_at = time.monotonic()
        async with asyncio.timeout(min(gap_timeout_s, left_s)):
            message = await receive()
        waited_s += time.monotonic() - began_at
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        try:
            parser.write(chunk)
            if not message.get("more_body", False):
                parser.finalize()
        except FormParserError as error:
            raise InvalidUpload(f"the body is not sound multipart/form-data: {error}") from None
        is_last = not message.get("more_body", False)
        if is_last or receiver.should_write:
            await _run_to_end(receiver.write)
        if is_last:
            if not receiver.is_complete:
                raise InvalidUpload("the body ends before its last boundary; send it whole")
            return


async def _run_to_end(work: Callable[[], None]) -> None:
    """Await the end of `work` in a thread before a cancellation is raised, because its files are closed then."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _boundary_of(headers: Mapping[bytes, bytes]) -> bytes:
    media_type, options = parse_options_header(headers.get(b"content-type", b"").decode("latin-1"))
    if media_type != b"multipart/form-data":
        found = media_type.decode("latin-1") or "none"
        raise InvalidUpload(f"content-type must be multipart/form-data (found {found})")
    if not 1 <= len(boundary := options.get(b"boundary", b"")) <= 70:
        raise InvalidUpload("the content-type multipart/form-data needs a boundary of 1 to 70 characters")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        raise InvalidUpload("content-encoding is not supported: send the body as it is")
    return boundary


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the upload is larger than {max_bytes} bytes: train with a lower rank, save in 16 bits, or have "
        "adapter_limits.max_bytes raised"
    )
