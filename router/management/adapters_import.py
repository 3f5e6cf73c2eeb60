"""POST /v1/adapters and …/push: import uploaded files as a revision; a push also loads it on workers."""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.catalog.described import revision_as_json
from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.rights import Right
from adapters.catalog.sql.tenants import CatalogQuota
from adapters.errors import AdapterError, AdapterNotFound, CatalogUnavailable
from adapters.identity import LATEST, AdapterReference, full_name_of, split_adapter_name
from adapters.library import AdapterLibrary, PackedAdapter
from adapters.packed.packing import take_packed
from router.errors import InvalidField, PushFailed, TooManyUploads
from router.identity.access import principal_of
from router.identity.audit import described, note_of
from router.management.management import Management, json_answer
from router.management.request_fields import check_not_base_model, given_positions
from router.management.upload import received_upload
from router.management.upload_receiver import FOLDER, Upload
from router.management.worker_calls import Outcomes, on_each
from router.protocol.request_body import Room
from router.public_errors import without_path

_OTHER_FILES_BYTES = 8 * 1024**2  # configuration, shard index, multipart framing
_MAX_UPLOADS = 4  # concurrent; each takes an adapter's size on the disk
_MEMORY_ONLY, _POSITIONS = "memory_only", "positions"  # form fields
_RESIDENCY_TIMEOUT_S = 2.0  # for workers' control streams to report a pushed revision

T = TypeVar("T")

log = logging.getLogger(__name__)


class ImportEndpoint:
    """The paths that take uploads."""

    def __init__(self, management: Management) -> None:
        self._management = management
        self._room = Room(_MAX_UPLOADS, "uploads", TooManyUploads)

    @property
    def routes(self) -> list[Route]:
        guarded = self._management.guarded
        return [
            Route("/v1/adapters", guarded(self.create, "import"), methods=["POST"]),
            Route("/v1/adapters/{name:path}/push", guarded(self.push, "push"), methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Import the files as a revision and point an alias at it, `latest` by default."""
        by = principal_of(request.scope).name

        def check(field: str, value: str) -> None:  # as soon as it has arrived, before files that follow it
            if field == "name":
                tenant, _ = self._management.changeable(request, value)
                check_not_base_model(value, self._management.backends.model, "name")
                self._management.backends.quotas.take_push(tenant)

        async with self._uploaded(request, ("name", "alias", _POSITIONS), check) as upload:
            if (name := upload.fields.get("name")) is None:
                raise InvalidField("name is required: the adapter's name, or tenant/name", param="name")
            alias = _alias(name, upload.fields.get("alias"))
            current = await self._current(request, name, alias)
            revision = await self._imported(request, name, upload, by, alias=alias)
        _note(request, alias, current, revision)
        await self._management.changed({each.revision_id for each in (revision, *_targets(current))})
        return json_answer({**self._as_json(revision), "alias": alias}, 201)

    async def push(self, request: Request) -> Response:
        """Import the files, load the revision on the workers that have the alias's current one, then move the alias.

        Requests in flight finish on the revision that they began with. If all workers fail to load it, the alias does
        not move. If only some fail, the answer reports them, and they load it on demand. A memory-only revision is sent
        to all workers instead; those that fail do not get it.
        """
        began_at = time.monotonic()
        name, by = request.path_params["name"], principal_of(request.scope).name
        tenant, _ = self._management.changeable(request)  # before an upload is taken
        self._management.backends.quotas.take_push(tenant)
        more = (FOLDER,) if self._management.is_from_trainer(request) else ()
        async with self._uploaded(request, ("alias", _MEMORY_ONLY, _POSITIONS, *more)) as upload:
            alias = _alias(name, upload.fields.get("alias"))
            current = await self._current(request, name, alias)
            if is_memory_only := upload.fields.get(_MEMORY_ONLY) == "true":
                revision, outcomes = await self._send(request, name, upload, alias, by)
            else:
                revision = await self._imported(request, name, upload, by, alias=None)
        if not is_memory_only:
            outcomes = await self._load(revision, current, alias)
            await self._point(request, alias, revision, by)
        _note(request, alias, current, revision)
        await self._management.changed({each.revision_id for each in (revision, *_targets(current))})
        seconds = round(time.monotonic() - began_at, 4)
        return json_answer(
            {**self._as_json(revision), "alias": alias, "workers": outcomes.described(), "seconds": seconds}
        )

    def _as_json(self, revision: AdapterRevision) -> dict[str, Any]:
        return revision_as_json(revision, self._management.max_expert_rank)

    @property
    def _timeout_s(self) -> float:
        """For workers to load a pushed revision."""
        return self._management.backends.config.adapter_timeout_s

    async def _load(self, revision: AdapterRevision, current: AdapterRevision | None, alias: str) -> Outcomes:
        """Load the revision on every worker that has the current one, or one of two. Raises PushFailed.

        A worker that drains loads nothing.
        """
        fleet = self._management.backends.fleet
        having = dict.fromkeys(worker for each in _targets(current) for worker in fleet.workers_with(each.revision_id))
        holders = [worker for worker in having if not fleet.state.workers[worker].is_draining]
        outcomes = await on_each(
            holders,
            lambda worker: fleet.link(worker).ensure_adapter(
                revision.revision_id, self._timeout_s, tenant=revision.tenant
            ),
        )
        if outcomes.all_failed:
            first = next(iter(outcomes.errors.values()))
            raise PushFailed(
                f"no worker could load the new revision r{revision.number} ({revision.revision_id}), so {alias!r} "
                f"stays where it is; try again, or point it there. The first worker's reason: {first}"
            )
        return outcomes

    async def _send(
        self, request: Request, name: str, upload: Upload, alias: str, by: str
    ) -> tuple[AdapterRevision, Outcomes]:
        """Send a memory-only revision to every worker that can hold it, then commit its row and its alias at once.

        The order ensures that the catalog names no revision that no worker has. Raises PushFailed, NoWorkerAvailable.
        """
        fleet, memory_only = self._management.backends.fleet, self._management.memory_only
        right = self._right(request, name)
        packed = await self._packed(request, name, upload)
        holders = [view.name for view in self._management.holders(None, packed.manifest.positions)]
        pinned_before: set[str] = set()

        async def send(worker: str) -> None:
            if await fleet.link(worker).put_adapter(packed, self._timeout_s):
                pinned_before.add(worker)

        async with memory_only.pushing(packed.revision_id):
            outcomes = await on_each(holders, send)
            if outcomes.all_failed:
                first = next(iter(outcomes.errors.values()))
                raise PushFailed(
                    f"no worker could take the new revision {packed.revision_id}, so nothing has changed; push it "
                    f"again. The first worker's reason: {first}"
                )
            loaded_on = set(outcomes.seconds)
            await fleet.wait_until(
                lambda: loaded_on <= set(fleet.workers_with(packed.revision_id)), _RESIDENCY_TIMEOUT_S
            )
            try:
                revision = await self._management.backends.adapters.with_library(
                    lambda library: library.add_in_memory(name, packed, alias, by=by, quota=self._quota(name)),
                    self._management.backends.config.upload_timeout_s,
                    right,
                    principal_of(request.scope),
                )
            except AdapterError as error:
                if not isinstance(error, CatalogUnavailable):  # which leaves open whether the commit was made
                    await memory_only.release(packed.revision_id, outcomes.seconds.keys() - pinned_before)
                raise
        _log_import(revision)
        return revision, outcomes

    @asynccontextmanager
    async def _uploaded(
        self, request: Request, fields: tuple[str, ...], on_field: Callable[[str, str], None] | None = None
    ) -> AsyncIterator[Upload]:
        config = self._management.backends.config
        with self._room.held(principal_of(request.scope).confined_to, 1):
            async with received_upload(
                dict(request.scope["headers"]),
                request.receive,
                fields=fields,
                memory_field=_MEMORY_ONLY if _MEMORY_ONLY in fields else None,
                max_bytes=self._management.max_adapter_bytes + _OTHER_FILES_BYTES,
                gap_timeout_s=config.body_timeout_s,
                timeout_s=config.upload_timeout_s,
                on_field=on_field,
            ) as upload:
                yield upload

    async def _imported(
        self, request: Request, name: str, upload: Upload, by: str, *, alias: str | None
    ) -> AdapterRevision:
        """The new revision, to which the alias already points unless it is None."""
        folder, positions, quota = upload.folder, given_positions(upload.fields.get(_POSITIONS)), self._quota(name)
        revision = await self._read(
            request,
            name,
            upload,
            lambda library: library.import_directory(
                name, folder, by=by, moves_latest=False, alias=alias, quota=quota, positions=positions
            ),
        )
        _log_import(revision)
        return revision

    async def _read(self, request: Request, name: str, upload: Upload, work: Callable[[AdapterLibrary], T]) -> T:
        """The result of `work` on the library, which reads the upload's folder."""
        check_not_base_model(name, self._management.backends.model, "name")
        if self._management.is_from_trainer(request):
            packer = partial(take_packed, is_carried=upload.work_folder is not None)
            given, work = work, lambda library: given(replace(library, packer=packer))
        timeout_s = self._management.backends.config.upload_timeout_s
        try:
            return await self._management.backends.adapters.with_library(
                work, timeout_s, self._right(request, name), principal_of(request.scope)
            )
        except AdapterError as error:
            raise without_path(error, upload.folder, "the upload") from None

    def _right(self, request: Request, name: str) -> Right:
        tenant, _ = split_adapter_name(name)
        return self._management.right(request, tenant)

    def _quota(self, name: str) -> CatalogQuota | None:
        tenant, _ = split_adapter_name(name)
        return self._management.backends.quotas.catalog_quota(tenant)

    async def _packed(self, request: Request, name: str, upload: Upload) -> PackedAdapter:
        """Pack the adapter in the upload's folder, which is in shared memory and removed with the upload."""
        folder, positions, quota = upload.folder, given_positions(upload.fields.get(_POSITIONS)), self._quota(name)
        packed = folder / "packed" / "adapter"
        return await self._read(
            request, name, upload, lambda library: library.pack(name, folder, packed, quota, positions)
        )

    async def _current(self, request: Request, name: str, alias: str) -> AdapterRevision | None:
        """The revision that the alias points to; None if there is no such adapter or alias yet."""
        reference = AdapterReference(*split_adapter_name(name), alias)
        try:
            return await self._management.ask(request, lambda catalog: catalog.resolve_parsed(reference))
        except AdapterNotFound:
            return None

    async def _point(self, request: Request, alias: str, revision: AdapterRevision, by: str) -> None:
        def move(catalog: SqlCatalog) -> None:
            quota = self._management.backends.quotas.catalog_quota(revision.tenant)
            catalog.set_alias(revision.tenant, revision.name, alias, revision.number, by=by, quota=quota)

        await self._management.change(request, revision.tenant, move)


def _note(request: Request, alias: str, old: AdapterRevision | None, new: AdapterRevision) -> None:
    note = note_of(request.scope)
    note.object = f"{new.full_name}@{alias}"
    note.old, note.new = described(old), described(new)


def _targets(current: AdapterRevision | None) -> list[AdapterRevision]:
    """The one or two revisions that an alias points to."""
    if current is None:
        return []
    return [current] if current.split is None else [current, current.split.newer]


def _log_import(revision: AdapterRevision) -> None:
    fields = {"adapter": revision.full_name, "number": revision.number, "revision": revision.revision_id}
    log.info("adapter imported", extra={"fields": {**fields, "stored": revision.stored}})


def _alias(name: str, alias: str | None) -> str:
    """The alias to move. Raises InvalidReference and InvalidField."""
    full_name = full_name_of(*split_adapter_name(name))
    if alias is None:
        return LATEST
    if AdapterReference.parse(f"{full_name}@{alias}").alias != alias:
        raise InvalidField(f"alias {alias!r} would be a revision in a reference; choose another one", param="alias")
    return alias
