"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM's clients."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from adapters.catalog.records import AdapterRevision
from adapters.errors import AdapterError, AdapterMissing, AdapterNotFound, CatalogConflict
from adapters.identity import full_name_of
from adapters.library import AdapterLibrary
from router.errors import InvalidField, TooManyUploads
from router.identity.access import principal_of
from router.identity.audit import note_of
from router.management.concurrency import ConcurrencyLimit
from router.management.management import Management
from router.management.request_fields import check_not_base_model, field, given_positions, required
from router.public_errors import without_path

_MAX_LOADS = 4  # concurrent; each takes an adapter's size on the disk, and a thread


class VllmEndpoint:
    """Loading imports a directory on the router's machine; unloading deletes the adapter.

    As in vLLM, unknown fields are ignored: clients send `base_model_name`, which often is a path.
    """

    def __init__(self, management: Management) -> None:
        self._management = management
        self._limit = ConcurrencyLimit(_MAX_LOADS, "directories", TooManyUploads)

    @property
    def routes(self) -> list[Route]:
        guarded = self._management.guarded
        return [
            Route("/v1/load_lora_adapter", guarded(self.load, "load"), methods=["POST"]),
            Route("/v1/unload_lora_adapter", guarded(self.unload, "unload"), methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """Import a directory below `router.adapter_root` as the latest revision, for `positions` if it is given."""
        fields = await self._management.any_fields(request)
        name = required(fields, "lora_name", str, "the adapter's name")
        path = required(fields, "lora_path", str, "the adapter's directory on the router's machine")
        positions = given_positions(field(fields, "positions", str, "'prefill'"))
        in_place = bool(field(fields, "load_inplace", bool, "true or false"))
        tenant, short_name = self._management.changeable(request, name)
        check_not_base_model(name, self._management.backends.model, "lora_name")
        by = principal_of(request.scope).name
        directory = _below(self._management.backends.config.adapter_root, path)
        self._management.backends.quotas.take_push(tenant)
        right, quota = self._management.right(request, tenant), self._management.backends.quotas.catalog_quota(tenant)

        def imported(library: AdapterLibrary) -> AdapterRevision:
            if not in_place and _exists(library, full_name_of(tenant, short_name)):
                raise InvalidField(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    param="lora_name",
                )
            try:
                return library.import_directory(name, directory, by=by, quota=quota, positions=positions)
            except CatalogConflict:  # unloaded before, after which vLLM's clients may load it again
                library.catalog.restore(tenant, short_name, quota=quota)
                return library.import_directory(name, directory, by=by, quota=quota, positions=positions)

        timeout_s = self._management.backends.config.upload_timeout_s
        try:
            with self._limit.slot(principal_of(request.scope)):
                revision = await self._management.backends.adapters.with_library(imported, timeout_s, right)
        except AdapterError as error:
            raise without_path(error, directory, repr(path)) from None
        note_of(request.scope).new = f"r{revision.number} {revision.revision_id}"
        await self._management.changed()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Delete an adapter. It can be restored."""
        fields = await self._management.any_fields(request)
        name = required(fields, "lora_name", str, "the adapter's name")
        tenant, short_name = self._management.changeable(request, name)
        try:
            await self._management.change(request, tenant, lambda catalog: catalog.delete(tenant, short_name))
        except AdapterNotFound:
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.") from None
        await self._management.changed()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _exists(library: AdapterLibrary, name: str) -> bool:
    try:
        library.catalog.resolve(name)
    except AdapterNotFound:
        return False
    return True


def _below(root: Path | None, path: str) -> Path:
    """The real path of a directory. Raises InvalidField if it is not below `root`, AdapterMissing if it is absent."""
    if root is None:
        raise InvalidField(
            "this router reads no directories; set router.adapter_root in cluster.yaml to the folder that has them, or "
            "send the files to POST /v1/adapters",
            param="lora_path",
        )
    try:
        real_root = root.resolve(strict=True)
        real = (real_root / path).resolve()
    except (OSError, ValueError, RuntimeError):  # a missing root, a NUL, a loop of links
        raise AdapterMissing(f"{path[:200]!r} cannot be read below router.adapter_root") from None
    if real == real_root or not real.is_relative_to(real_root):
        raise InvalidField(
            f"lora_path {path[:200]!r} is not below router.adapter_root, or is a link to outside of it",
            param="lora_path",
        )
    if not real.is_dir():
        raise AdapterMissing(f"{path[:200]!r} is not a directory below router.adapter_root")
    return real
