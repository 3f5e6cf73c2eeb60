"""GET /v1/adapters/{name}/export: a revision as an archive of the directory that `prelude adapters export` writes."""

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
from router.management.management import Management, Places, check_known
from router.management.tar_archive import TarArchive
from router.management.thread_work import to_its_end

_MAX_EXPORTS = 4  # at a time: each takes an adapter's bytes on the disk until its client has them

log = logging.getLogger(__name__)


class ExportEndpoint:
    """What hands content out."""

    def __init__(self, management: Management) -> None:
        self._management = management
        self._places = Places(_MAX_EXPORTS, "exports", TooManyExports)

    @property
    def routes(self) -> list[Route]:
        guarded = self._management.guarded
        return [_ExportRoute("/v1/adapters/{name:path}/export", guarded(self.export, None), methods=["GET"])]

    async def export(self, request: Request) -> Response:
        """The revision that `reference` stands for, else the latest one."""
        check_known(request.query_params, ("reference",))
        config = self._management.backends.config
        async with AsyncExitStack() as held:
            held.enter_context(self._places.taken())
            revision = await self._management.resolved(
                request.path_params["name"], request.query_params.get("reference")
            )
            check_exportable(revision)  # here, where its words are not taken for the store's
            export = _Export(revision)
            held.push_async_callback(export.close)
            archive = await self._management.adapters.from_library(export.prepare, config.upload_timeout_s)
            return _ArchiveResponse(
                revision,
                archive,
                held.pop_all(),
                piece_timeout_s=config.body_timeout_s,
                timeout_s=config.upload_timeout_s,
            )


class _ExportRoute(Route):
    """Not that of `acme%2Fexport`, which is a name as a whole: else no path would show an adapter `acme/export`."""

    def matches(self, scope: Any) -> tuple[Match, Any]:
        if not scope["raw_path"].endswith(b"/export"):
            return Match.NONE, {}
        return super().matches(scope)


class _Export:
    """One archive, which a thread makes. It is closed once, also where nobody waits for the thread any more."""

    def __init__(self, revision: AdapterRevision) -> None:
        self._revision = revision
        self._lock = threading.Lock()
        self._archive: TarArchive | None = None
        self._is_closed = False

    def prepare(self, library: AdapterLibrary) -> TarArchive:
        """Blocking. Leaves nothing that has a name: the files of the archive are open, their folder is gone."""
        with work_folder("export") as folder:
            library.export_revision(self._revision, folder / "adapter")
            archive = TarArchive(folder / "adapter", _plain_name(self._revision), self._revision.created_at)
        with self._lock:
            self._archive = archive
            if self._is_closed:
                archive.close()
        return archive

    async def close(self) -> None:
        await asyncio.shield(asyncio.to_thread(self._close))  # the bytes of removed files go now, which takes a while

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._archive is not None:
                self._archive.close()


class _ArchiveResponse(Response):
    """An archive, a piece at a time. What it needs is `held` until the last piece is sent or the client has left."""

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
                "content-length": str(archive.num_bytes),  # a client can tell when the answer was cut off
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
            try:  # the server closes a connection whose answer is not complete
                async with asyncio.timeout(self._timeout_s):
                    end = await self._send(Request(scope, receive), send)
            except TimeoutError:
                end = "client too slow"
            except asyncio.CancelledError:  # by the server: the drain's time is over
                end = "router stopping"
        revision, num_bytes = self._revision, self._archive.num_bytes
        fields = {"adapter": revision.full_name, "number": revision.number, "revision": revision.revision_id}
        log.info("adapter exported", extra={"fields": {**fields, "bytes": num_bytes, "end": end}})

    async def _send(self, request: Request, send: Any) -> Literal["done", "client left"]:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pieces = self._archive.pieces() if request.method == "GET" else iter(())  # HEAD: how large it is
        while (piece := await to_its_end(asyncio.to_thread(next, pieces, None))) is not None:
            if await request.is_disconnected():
                return "client left"
            async with asyncio.timeout(self._piece_timeout_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "done"


def _plain_name(revision: AdapterRevision) -> str:
    """As a file is called, without its ending. A name's parts have no characters that would be special there."""
    return f"{revision.full_name.replace('/', '-')}-r{revision.number}"
