"""/api/v1: the Tinker API, passed on to the trainer in the caller's name. Bodies pass through, unread and unchanged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from starlette.routing import Route
from yarl import URL

from cluster.config.router import RouterConfig
from process.addresses import host_and_port
from router.errors import (
    BodyTooLarge,
    BodyTooSlow,
    NotOffered,
    RouterError,
    Stopping,
    TooManyTrainingCalls,
    TrainerRefused,
    TrainerUnavailable,
)
from router.generation.backends import Backends
from router.generation.client_answer import while_connected
from router.http.client_connection import SCOPE_KEY
from router.http.connections import ClientConnection
from router.http.engine_connections import Tls
from router.identity.access import principal_of
from router.identity.audit import begin_note, note_of
from router.identity.gate import TRAINING, credential_in
from router.protocol.request_body import ClientGone, Room
from training.service.identity import OBJECT_HEADER, headers_of_router

_MAX_CALLS = 8000  # at the trainer; most are polls
_SILENT_S = 120.0  # of a trainer: its polls answer after 20 s
_STATUS_S = 5.0  # of a call for an operator
_IDLE_S = 2.0  # it closes idle connections after 5 s; a call on a closing one would fail
_PASSED_ON = (b"content-type", b"content-encoding", b"content-length")  # no header can be taken for one of the router's
_RETURNED = ("content-type", "content-length", "retry-after")
_CHANGES = frozenset({"create_model", "load_weights", "save_weights", "save_weights_for_sampler"})
_POLL = f"{TRAINING}retrieve_future"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainerAddress:
    """Where the trainer is, and how it knows that a call is this router's."""

    url: str
    key: str = field(repr=False)
    tls: Tls | None = None

    @property
    def status(self) -> str:
        """host:port of its /metrics: the port after the URL's."""
        place = URL(self.url)
        return host_and_port(place.host or "", (place.port or 0) + 1)


class TrainingEndpoint:
    """The Tinker API, as an ASGI application."""

    def __init__(self, backends: Backends, trainer: TrainerAddress | None) -> None:
        self._backends, self._trainer = backends, trainer
        self._room = Room(_MAX_CALLS, "calls of the trainer", TooManyTrainingCalls)
        self._session: aiohttp.ClientSession | None = None

    @property
    def routes(self) -> list[Route]:
        return [Route(f"{TRAINING}{{path:path}}", self, methods=["GET", "POST", "PUT", "DELETE"])]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Keep connections to the trainer inside the block."""
        connect_s = self._backends.config.connect_timeout_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=_SILENT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)  # there is room
        async with aiohttp.ClientSession(
            timeout=timeout, connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        ) as self._session:
            yield

    @property
    def is_offered(self) -> bool:
        return self._trainer is not None

    async def models(self) -> list[dict[str, Any]]:
        """All tenants' models in training, as the trainer tells operators. Raises TrainerUnavailable, NotOffered."""
        trainer, session = self._offered(), self._session
        assert session is not None
        context, server = (True, None) if trainer.tls is None else trainer.tls()
        options: Any = {"timeout": aiohttp.ClientTimeout(_STATUS_S), "ssl": context, "server_hostname": server}
        headers = {"authorization": f"Bearer {trainer.key}"}
        try:
            async with session.get(f"{trainer.url}/models", headers=headers, **options) as answer:
                if answer.status != 200:
                    raise TrainerUnavailable(f"the trainer answers {answer.status}; it and this router need one key")
                return (await answer.json(content_type=None))["models"]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            raise TrainerUnavailable("the trainer does not answer: see that `prelude trainer` runs") from error

    def _offered(self) -> TrainerAddress:
        if self._trainer is None:
            raise NotOffered("nothing is trained here: set trainer.url in cluster.yaml, and start `prelude trainer`")
        return self._trainer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises RouterError, before anything is sent or in the middle of an answer."""
        trainer = self._offered()
        call = _Call(scope, receive, self._backends.config)
        try:
            with self._room.held(principal_of(scope).confined_to, 1):
                await while_connected(call.connection, self._pass_on(call, send, trainer))
        except ClientGone:
            pass
        except asyncio.CancelledError:  # by the server, at the drain timeout
            raise call.for_poll(Stopping("the router is stopping")) from None

    async def _pass_on(self, call: _Call, send: Any, trainer: TrainerAddress) -> None:
        change = call.change  # until it is logged
        try:
            if change is not None:
                begin_note(call.scope)
                self._backends.quotas.take_change(principal_of(call.scope).tenant)
            async with self._asked(call, trainer) as answer:
                if answer.status == 401:
                    raise TrainerUnavailable("the trainer and this router need the same trainer.key")
                if change is not None:
                    note_of(call.scope).object = answer.headers.get(OBJECT_HEADER)
                    made, change = change, None
                    await self._log(call, made, TrainerRefused(str(answer.status)) if answer.status >= 400 else None)
                await _relay(answer, send)
        except BaseException as error:  # also when the client has left, or the server cancels the request
            told = call.told(error)
            if change is not None:
                await self._log(call, change, told)
            if told is error:
                raise
            raise told from None  # it may be the cause of what aiohttp raises

    def _asked(self, call: _Call, trainer: TrainerAddress) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The trainer's answer, once its head is there."""
        assert self._session is not None
        scope = call.scope
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PASSED_ON}
        credential = None if self._backends.config.auth is None else credential_in(scope)
        directory = self._backends.adapters.directory
        if not directory.is_loaded:  # it may be the next tenant of a name, who has nothing of the one before
            raise TrainerUnavailable("the router has not reached the catalog of tenants yet; try again")
        tenant = directory.lasting_name(principal_of(scope))
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        context, server = (True, None) if trainer.tls is None else trainer.tls()
        return self._session.request(
            scope["method"],
            URL(trainer.url + target.decode("ascii"), encoded=True),  # as the client has written it
            data=call.body() if call.has_body else None,
            headers={**headers, **headers_of_router(trainer.key, tenant, credential)},
            allow_redirects=False,
            ssl=context,
            server_hostname=server,
        )

    async def _log(self, call: _Call, change: str, failure: BaseException | None) -> None:
        """Write a change to the audit log, before its client gets the answer."""
        await self._backends.audit.changed(call.scope, principal_of(call.scope), change, failure)


async def _relay(answer: aiohttp.ClientResponse, send: Any) -> None:
    """Each part is read when the client has taken those before it."""
    headers = [(each.encode(), answer.headers[each].encode("latin-1")) for each in _RETURNED if each in answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    async for part in answer.content.iter_any():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body"})


class _Call:
    """One request of a client."""

    def __init__(self, scope: Any, receive: Any, config: RouterConfig) -> None:
        """Raises BodyTooLarge for a declared length over the limit."""
        self.scope, self._receive = scope, receive
        self.connection: ClientConnection = scope.pop(SCOPE_KEY)  # as RequestFlow does
        self._most, self._within_s = config.max_body_bytes, config.body_timeout_s
        self._failure: RouterError | None = None  # why the body ended early
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        self.has_body = declared != b"0" or b"transfer-encoding" in headers
        if declared.isdigit() and int(declared) > self._most:
            raise self._too_large()

    @property
    def change(self) -> str | None:
        """Its action in the audit log; None: it is not there. Steps are counted, not logged one by one."""
        name = self.scope["path"].removeprefix(TRAINING)
        if self.scope["method"] in ("PUT", "DELETE"):  # of a checkpoint: PUT when it expires
            return "training.expire" if self.scope["method"] == "PUT" else "training.delete"
        return f"training.{name}" if self.scope["method"] == "POST" and name in _CHANGES else None

    async def body(self) -> AsyncIterator[bytes]:
        """Each part is asked for when those before it have been written, so a slow trainer holds the client back."""
        loop = asyncio.get_running_loop()
        ends_at, num_bytes = loop.time() + self._within_s, 0
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, has_more = message.get("body", b""), message.get("more_body", False)
            num_bytes += len(part)
            if num_bytes > self._most:
                self._failure = self._too_large()
            elif loop.time() > ends_at:
                self._failure = BodyTooSlow(f"the body did not arrive within {self._within_s:g} s")
            if self._failure is not None:
                raise self._failure
            yield part

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._most} bytes; send less data at a time")

    def told(self, error: BaseException) -> BaseException:
        """What the client and the audit log are told of an error."""
        if self.connection.is_lost:
            return ClientGone() if isinstance(error, asyncio.CancelledError) else error
        if isinstance(error, aiohttp.ClientError | OSError | TimeoutError):  # TimeoutError: of a trainer that hangs
            if self._failure is not None:
                return self._failure
            log.warning("the trainer is lost", extra={"fields": {"reason": str(error) or type(error).__name__}})
            error = TrainerUnavailable("the trainer does not answer: see that `prelude trainer` runs at trainer.url")
        return self.for_poll(error) if isinstance(error, TrainerUnavailable) else error

    def for_poll(self, error: RouterError) -> RouterError:
        """The SDK repeats a poll without a pause after a 5xx, and with growing ones after a 429."""
        if self.scope["path"] == _POLL:
            error.http_status = TooManyTrainingCalls.http_status
        return error
