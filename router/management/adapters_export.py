"""GET /v1/adapters/{name}/export: the files that `prelude adapters export` writes, as a tar archive."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AsyncExitStack
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from adapters.catalog.records import AdapterRevision
from adapters.files.work_folder import work_folder
from adapters.library import AdapterLibrary, check_exportable
from router.errors import TooManyExports
from router.identity.access import principal_of
from router.management.concurrency import ConcurrencyLimit, run_to_end
from router.management.management import Management
from router.management.request_fields import check_known
from router.management.tar_archive import TarArchive
from router.management.upload import MIN_BYTES_PER_S

_MAX_EXPORTS = 4  # concurrent; each takes an adapter's size on the disk until its client has received it

log = logging.getLogger(__name__)


class ExportEndpoint:
    """The export path."""

    def __init__(self, management: Management) -> None:
        self._management = management
        self._limit = ConcurrencyLimit(_MAX_EXPORTS, "exports", TooManyExports)

    @property
    def routes(self) -> list[Route]:
        guarded = self._management.guarded
        return [_ExportRoute("/v1/adapters/{name:path}/export", guarded(self.export, None), methods=["GET"])]

    async def export(self, request: Request) -> Response:
        """Send the revision that `reference` selects, else the latest one."""
        check_known(request.query_params, ("reference",))
        config = self._management.backends.config
        async with AsyncExitStack() as held:
            held.enter_context(self._limit.slot(principal_of(request.scope)))
            key = self._management.readable(request)
            revision = await self._management.resolved(request, key, request.query_params.get("reference"))
            check_exportable(revision)  # here, because errors inside `prepare` count as the store's
            export = _Export(revision)
            held.push_async_callback(export.close)
            archive = await self._management.backends.adapters.from_library(export.prepare, config.upload_timeout_s)
            return _ArchiveResponse(
                revision,
                archive,
                held.pop_all(),
                piece_timeout_s=config.body_timeout_s,
                timeout_s=min(config.upload_timeout_s, config.body_timeout_s + archive.num_bytes / MIN_BYTES_PER_S),
            )


class _ExportRoute(Route):
    """Matches export paths, but not `acme%2Fexport`, the path of an adapter named `acme/export`."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        if not scope["raw_path"].endswith(b"/export"):
            return Match.NONE, {}
        return super().matches(scope)


class _Export:
    """One archive, made in a thread. It is closed exactly once, even if the request ends before the thread does."""

    def __init__(self, revision: AdapterRevision) -> None:
        self._revision = revision
        self._lock = threading.Lock()
        self._archive: TarArchive | None = None
        self._is_closed = False

    def prepare(self, library: AdapterLibrary) -> TarArchive:
        """Make the archive. Its folder is removed already; its files stay open until it is closed. Blocking."""
        with work_folder("export") as folder:
            library.export_revision(self._revision, folder / "adapter")
            archive = TarArchive(folder / "adapter", _plain_name(self._revision), self._revision.created_at)
        with self._lock:
            self._archive = archive
            if self._is_closed:
                archive.close()
        return archive

    async def close(self) -> None:
        await asyncio.shield(asyncio.to_thread(self._close))  # in a thread: it frees the bytes of the files

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._archive is not None:
                self._archive.close()


class _ArchiveResponse(Response):
    """Streams an archive in pieces. Closes `held` after the last piece or when the client disconnects."""

    media_type = "application/x-tar"

    def __init__(
        self,
        revision: AdapterRevision,
        archive: TarArchive,
        held: AsyncExitStack,
        *,
        piece_timeout_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(
            headers={
                "content-length": str(archive.num_bytes),  # lets clients detect a truncated answer
                "content-disposition": f'attachment; filename="{_plain_name(revision)}.tar"',
                "x-prelude-adapter": revision.full_name,
                "x-prelude-revision": revision.revision_id,
            }
        )
        self._revision = revision
        self._archive = archive
        self._held = held
        self._piece_timeout_s = piece_timeout_s
        self._timeout_s = timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._held:
            end: str
            try:  # the server closes the connection if the answer is incomplete
                async with asyncio.timeout(self._timeout_s):
                    end = await self._send(Request(scope, receive), send)
            except TimeoutError:
                end = "client too slow"
            except asyncio.CancelledError:  # by the server, at the drain timeout
                end = "router stopping"
        revision, num_bytes = self._revision, self._archive.num_bytes
        fields = {"adapter": revision.full_name, "number": revision.number, "revision": revision.revision_id}
        log.info("adapter exported", extra={"fields": {**fields, "bytes": num_bytes, "end": end}})

    async def _send(self, request: Request, send: Any) -> Literal["done", "client left"]:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = self._archive.pieces() if request.method == "GET" else iter(())  # HEAD
        while (piece := await run_to_end(asyncio.to_thread(next, pieces, None))) is not None:
            if await request.is_disconnected():
                return "client left"
            async with asyncio.timeout(self._piece_timeout_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "done"


def _plain_name(revision: AdapterRevision) -> str:
    """The archive's name without its suffix. Adapter names contain no special characters besides the slash."""
    return f"{revision.full_name.replace('/', '-')}-r{revision.number}"
