"""POST /v1/adapters and …/push: an adapter's files become a revision, the second everywhere at once."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.catalog.described import revision_as_json
from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterError, AdapterNotFound, CatalogUnavailable
from adapters.identity import LATEST, AdapterReference, full_name_of
from adapters.library import PackedAdapter
from router.errors import InvalidField, PushFailed
from router.management.management import BY, Management, Outcomes, Places, adapter_key, check_not_base_model, on_each
from router.management.upload import Upload, received_upload
from router.protocol.json_answer import json_answer
from router.public_errors import without_path

_OTHER_FILES_BYTES = 8 * 1024**2  # configuration, an index of shards, what multipart adds
_MAX_UPLOADS = 4  # at a time: each takes an adapter's bytes on the disk
_MAX_WAIT_S = 3600.0
_MEMORY_ONLY = "memory_only"  # the field that says so
_SEEN_WITHIN_S = 2.0  # what a worker has taken, in its own word to this router
_GIVE_UP_S = 5.0

log = logging.getLogger(__name__)


class ImportEndpoint:
    """What brings new content."""

    def __init__(self, management: Management) -> None:
        self._management = management
        self._places = Places(_MAX_UPLOADS, "uploads")

    @property
    def routes(self) -> list[Route]:
        guarded = self._management.guarded
        return [
            Route("/v1/adapters", guarded(self.create, "import"), methods=["POST"]),
            Route("/v1/adapters/{name:path}/push", guarded(self.push, "push"), methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Imports the files as a revision and points an alias at it, the latest one unless another is named."""
        async with self._uploaded(request, ("name", "alias")) as upload:
            if (name := upload.fields.get("name")) is None:
                raise InvalidField("name is required: the adapter's name, or tenant/name", param="name")
            alias = _alias(name, upload.fields.get("alias"))
            revision = await self._imported(name, upload.folder, moves_latest=alias == LATEST)
        if alias != LATEST:
            await self._point(alias, revision)
        await self._management.changed()
        return json_answer({**revision_as_json(revision), "alias": alias}, 201)

    async def push(self, request: Request) -> Response:
        """Imports the files, loads the revision wherever the alias's present one is, then moves the alias.

        Requests in flight finish on the revision that they began with. The alias does not move where every worker that
        should have the new revision fails; one that fails is reported, and loads it when it is asked for it. Kept in
        memory only, the revision is sent to all workers instead, and one that fails does not get it.
        """
        began_at = time.monotonic()
        name = request.path_params["name"]
        async with self._uploaded(request, ("alias", "wait_s", _MEMORY_ONLY)) as upload:
            alias = _alias(name, upload.fields.get("alias"))
            wait_s = self._wait_s(upload.fields.get("wait_s"))
            old = await self._old(name, alias)
            if is_memory_only := upload.fields.get(_MEMORY_ONLY) == "true":
                revision, outcomes = await self._sent(name, upload.folder, alias, wait_s)
            else:
                revision = await self._imported(name, upload.folder, moves_latest=False)
        if not is_memory_only:
            outcomes = await self._loaded(revision, old, alias, wait_s)
            await self._point(alias, revision)
        await self._management.changed()
        seconds = round(time.monotonic() - began_at, 4)
        return json_answer(
            {**revision_as_json(revision), "alias": alias, "workers": outcomes.described(), "seconds": seconds}
        )

    async def _loaded(
        self, revision: AdapterRevision, old: AdapterRevision | None, alias: str, wait_s: float
    ) -> Outcomes:
        """The revision on every worker that has the old one. Raises PushFailed."""
        fleet = self._management.backends.fleet
        holders = () if old is None else fleet.workers_with(old.revision_id)
        outcomes = await on_each(
            holders, lambda worker: fleet.link(worker).ensure_adapter(revision.revision_id, wait_s)
        )
        if outcomes.all_failed:
            first = next(iter(outcomes.errors.values()))
            raise PushFailed(
                f"no worker could load the new revision r{revision.number} ({revision.revision_id}), so {alias!r} "
                f"stays where it is; try again, or point it there. The first worker's reason: {first}"
            )
        return outcomes

    async def _sent(self, name: str, folder: Path, alias: str, wait_s: float) -> tuple[AdapterRevision, Outcomes]:
        """The revision in the memory of every worker that can hold it, then in the catalog, with its alias at once.

        What is in the catalog is on a worker, so. Raises PushFailed, and NoWorkerAvailable.
        """
        fleet, memory_only = self._management.backends.fleet, self._management.memory_only
        packed = await self._packed(name, folder)
        holders = [view.name for view in self._management.holders(None, packed.manifest.positions)]
        kept_before: set[str] = set()

        async def send(worker: str) -> None:
            if await fleet.link(worker).put_adapter(packed, wait_s):
                kept_before.add(worker)

        async def give_up(worker: str) -> None:
            await fleet.link(worker).pin_adapter(packed.revision_id, False, _GIVE_UP_S, memory_only=True)

        async with memory_only.pushing(packed.revision_id):
            outcomes = await on_each(holders, send)
            if outcomes.all_failed:
                first = next(iter(outcomes.errors.values()))
                raise PushFailed(
                    f"no worker could take the new revision {packed.revision_id}, so nothing has changed; push it "
                    f"again. The first worker's reason: {first}"
                )
            await fleet.wait_until_resident(packed.revision_id, outcomes.seconds, _SEEN_WITHIN_S)
            try:
                revision = await self._management.adapters.with_library(
                    lambda library: library.add_in_memory(name, packed, alias, by=BY),
                    self._management.backends.config.upload_timeout_s,
                )
            except AdapterError as error:
                if not isinstance(error, CatalogUnavailable):  # after which the alias may stand for it all the same
                    await on_each(outcomes.seconds.keys() - kept_before, give_up)
                raise
        _log_import(revision)
        return revision, outcomes

    @asynccontextmanager
    async def _uploaded(self, request: Request, fields: tuple[str, ...]) -> AsyncIterator[Upload]:
        config = self._management.backends.config
        with self._places.taken():
            async with received_upload(
                dict(request.scope["headers"]),
                request.receive,
                fields=fields,
                memory_field=_MEMORY_ONLY if _MEMORY_ONLY in fields else None,
                max_bytes=self._management.max_adapter_bytes + _OTHER_FILES_BYTES,
                gap_timeout_s=config.body_timeout_s,
                timeout_s=config.upload_timeout_s,
            ) as upload:
                yield upload

    async def _imported(self, name: str, folder: Path, *, moves_latest: bool) -> AdapterRevision:
        check_not_base_model(name, self._management.backends.model, "name")
        try:
            revision = await self._management.adapters.with_library(
                lambda library: library.import_directory(name, folder, by=BY, moves_latest=moves_latest),
                self._management.backends.config.upload_timeout_s,
            )
        except AdapterError as error:
            raise without_path(error, folder, "the upload") from None
        _log_import(revision)
        return revision

    async def _packed(self, name: str, folder: Path) -> PackedAdapter:
        """Packed beside the upload, which is in shared memory, and gone with it."""
        check_not_base_model(name, self._management.backends.model, "name")
        try:
            return await self._management.adapters.with_library(
                lambda library: library.pack(name, folder, folder / "packed" / "adapter"),
                self._management.backends.config.upload_timeout_s,
            )
        except AdapterError as error:
            raise without_path(error, folder, "the upload") from None

    async def _old(self, name: str, alias: str) -> AdapterRevision | None:
        """What the alias stands for now; None where there is no such adapter or alias yet."""
        reference = f"{full_name_of(*adapter_key(name))}@{alias}"
        try:
            return await self._management.adapters.with_catalog(lambda catalog: catalog.resolve(reference))
        except AdapterNotFound:
            return None

    async def _point(self, alias: str, revision: AdapterRevision) -> None:
        def move(catalog: SqlCatalog) -> None:
            catalog.set_alias(revision.tenant, revision.name, alias, revision.number, by=BY)

        await self._management.adapters.with_catalog(move)

    def _wait_s(self, text: str | None) -> float:
        if text is None:
            return self._management.backends.config.adapter_timeout_s
        try:
            wait_s = float(text)
        except ValueError:
            wait_s = -1.0
        if not 0 < wait_s <= _MAX_WAIT_S:
            raise InvalidField(f"wait_s must be seconds, over 0 and at most {_MAX_WAIT_S:g}", param="wait_s")
        return wait_s


def _log_import(revision: AdapterRevision) -> None:
    fields = {"adapter": revision.full_name, "number": revision.number, "revision": revision.revision_id}
    log.info("adapter imported", extra={"fields": {**fields, "stored": revision.stored}})


def _alias(name: str, alias: str | None) -> str:
    """The alias to move, checked before anything is imported. Raises InvalidReference and InvalidField."""
    full_name = full_name_of(*adapter_key(name))
    if alias is None:
        return LATEST
    if AdapterReference.parse(f"{full_name}@{alias}").alias != alias:
        raise InvalidField(f"alias {alias!r} would be a revision in a reference; choose another one", param="alias")
    return alias
