"""What the handlers that manage adapters share: who may, what they read, and calls to several workers at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters import identity
from adapters.catalog.records import AdapterRevision
from adapters.errors import AdapterError, InvalidReference
from adapters.identity import AdapterReference, full_name_of, split_adapter_name
from router.errors import (
    InvalidField,
    ManagementOff,
    NoWorkerAvailable,
    RouterError,
    Stopping,
    TooManyUploads,
    UnknownWorker,
)
from router.fleet.fleet_state import WorkerView
from router.generation.backends import Backends
from router.metrics import AdapterChange, ChangeResult
from router.protocol.request_body import ClientGone, Fields, read_body, split
from router.revisions.adapter_service import AdapterService
from router.revisions.memory_only import MemoryOnlyRevisions

BY = "http"  # who moved an alias, in its history
_MAX_BODY_BYTES = 64 * 1024
_CLIENT_LEFT = 499
_MAX_CALLS = 64  # to workers, at once

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Management:
    """What every handler uses."""

    backends: Backends
    adapters: AdapterService
    memory_only: MemoryOnlyRevisions
    max_adapter_bytes: int  # of one adapter's weight files

    def guarded(self, handler: Handler, change: AdapterChange | None) -> Handler:
        """The handler where adapters are managed, a refusal elsewhere, before anything of the request is read.

        Each of its requests is counted as a `change`, None for a handler that changes nothing.
        """

        async def guard(request: Request) -> Response:
            try:
                with self._counted(change):
                    if not self.backends.config.management:
                        raise ManagementOff(
                            "this router does not manage adapters; set router.management to true in cluster.yaml, "
                            "where only those reach the router who may"
                        )
                    return await handler(request)
            except ClientGone:
                return Response(status_code=_CLIENT_LEFT)
            except asyncio.CancelledError:  # by the server: the drain's time is over
                raise Stopping("the router is stopping") from None

        return guard

    @contextmanager
    def _counted(self, change: AdapterChange | None) -> Iterator[None]:
        if change is None:
            yield
            return
        began_at = time.monotonic()
        result: ChangeResult = "failed"
        try:
            yield
            result = "done"
        except ClientGone:
            result = "left"
            raise
        except (RouterError, AdapterError) as error:
            result = "refused" if error.http_status < 500 else "failed"
            raise
        finally:
            self.backends.metrics.changed_adapters(change, result, time.monotonic() - began_at)

    async def changed(self) -> None:
        """Brings this router, and what workers keep in memory only, in step with what has just been changed."""
        await self.adapters.refresh()
        await self.memory_only.reconcile()

    async def fields(self, request: Request, *known: str) -> Fields:
        """The fields of a JSON body, none where there is no body. Raises RequestError with one that is not known."""
        fields = await self.any_fields(request)
        check_known(fields, known)
        return fields

    async def any_fields(self, request: Request) -> Fields:
        """As `fields`, whatever they are called: for paths of others, whose clients send more than is read here."""
        headers = dict(request.scope["headers"])
        if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            return {}
        config = self.backends.config
        body = await read_body(headers, request.receive, max_bytes=_MAX_BODY_BYTES, timeout_s=config.body_timeout_s)
        return split(body)

    async def resolved(self, name: str, pin: str | None) -> AdapterRevision:
        """The revision that `pin`, an alias, r7 or sha256:…, or `name@` and that, stands for; None for the latest."""
        full_name = full_name_of(*adapter_key(name))
        if pin is None or pin in (name, full_name):
            reference = full_name
        elif "@" in pin:
            reference = pin
        else:
            reference = f"{full_name}@{pin}"
        if AdapterReference.parse(reference).full_name != full_name:
            raise InvalidField(f"reference {pin!r} is of another adapter than {full_name!r}", param="reference")
        return await self.adapters.with_catalog(lambda catalog: catalog.resolve(reference))

    def holders(self, names: Collection[str] | None, positions: str) -> list[WorkerView]:
        """The workers named, or all that are connected and can apply an adapter of these positions.

        Raises UnknownWorker, and NoWorkerAvailable where there is none.
        """
        fleet = self.backends.fleet.state.workers
        roles = ("unified",) if positions == "all" else ("prefill", "unified")
        if names is None:
            if not (found := [view for view in fleet.values() if view.role in roles and view.is_connected]):
                raise NoWorkerAvailable("no worker that can hold this adapter is connected; try again soon")
            return found
        for name in names:
            if name not in fleet or fleet[name].role not in roles:
                fitting = ", ".join(sorted(view.name for view in fleet.values() if view.role in roles)) or "none"
                raise UnknownWorker(
                    f"workers: {name!r} is no worker that can hold this adapter; those are {fitting}", param="workers"
                )
        return [fleet[name] for name in dict.fromkeys(names)]


class Places:
    """How many may do something at a time. More are refused, not queued: each takes room and a thread."""

    def __init__(self, num_places: int, what: str, error: type[RouterError] = TooManyUploads) -> None:
        self._num_places = num_places
        self._what = what
        self._error = error
        self._num_taken = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Takes a place for the block. Raises the error that it was made with."""
        if self._num_taken >= self._num_places:
            raise self._error(f"{self._num_places} {self._what} are under way, which are all that are taken; try again")
        self._num_taken += 1
        try:
            yield
        finally:
            self._num_taken -= 1


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What each of several workers said."""

    seconds: Mapping[str, float]  # by worker, until it had done it
    errors: Mapping[str, RouterError]

    @property
    def all_failed(self) -> bool:
        return bool(self.errors) and not self.seconds

    def described(self) -> dict[str, Any]:
        """Seconds, or the error, by worker."""
        errors = {name: {"error": {"code": each.code, "message": str(each)}} for name, each in self.errors.items()}
        return dict(sorted({**{name: round(s, 4) for name, s in self.seconds.items()}, **errors}.items()))


async def on_each(workers: Collection[str], call: Callable[[str], Awaitable[object]]) -> Outcomes:
    """Calls workers at once, each call with the deadline that it brings along. One that fails stops none."""
    seconds: dict[str, float] = {}
    errors: dict[str, RouterError] = {}
    slots = asyncio.Semaphore(_MAX_CALLS)

    async def one(name: str) -> None:
        async with slots:
            began_at = time.monotonic()
            try:
                await call(name)
                seconds[name] = time.monotonic() - began_at
            except RouterError as error:
                errors[name] = error

    async with asyncio.TaskGroup() as group:
        for name in workers:
            group.create_task(one(name), name=f"adapter call to {name}")
    return Outcomes(seconds, errors)


def adapter_key(name: str) -> tuple[str, str]:
    """Tenant and name of `name` or `tenant/name`. Raises InvalidReference."""
    try:
        return split_adapter_name(name)
    except ValueError as error:
        raise InvalidReference(str(error)) from None


def check_not_base_model(name: str, base_model: str, param: str) -> None:
    """Raises InvalidField for the base model's name, before its adapter is sent or read."""
    try:
        identity.check_not_base_model(name, base_model)
    except ValueError as error:
        raise InvalidField(str(error), param=param) from None


def check_known(given: Collection[str], known: Collection[str]) -> None:
    """Raises InvalidField for the first name that is not known."""
    for name in given:
        if name not in known:
            expected = ", ".join(known) if known else "none"
            raise InvalidField(f"{name[:64]!r} is not known here; known are: {expected}", param=name[:64])


def field(fields: Fields, name: str, kind: Any, expected: str) -> Any:
    """A field's value, None where it is absent or null. Raises InvalidField."""
    if name not in fields:
        return None
    try:
        return msgspec.json.decode(fields[name], type=kind | None)
    except msgspec.MsgspecError:
        raise InvalidField(f"{name} must be {expected}", param=name) from None


def required(fields: Fields, name: str, kind: Any, expected: str) -> Any:
    """As `field`, for one that must be there. Raises InvalidField."""
    value = field(fields, name, kind, expected)
    if value is None:
        raise InvalidField(f"{name} is required: {expected}", param=name)
    return value
