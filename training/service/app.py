"""The Tinker API over HTTP, as SDK 0.38 calls it."""

import asyncio
import contextlib
import logging
import math
import shutil
import sqlite3
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from process.lifetime import meanwhile
from process.status_pages import serving_status
from training.executor.executor import ExecutorOptions
from training.executor.operations import Done, Failure, Operation, Pass, Scored
from training.executor.turns import Share, Turns
from training.runs.base import LoadedBase
from training.service import messages
from training.service.checkpoints import Checkpoints
from training.service.commands import Commands, LiveModel
from training.service.data.passes import DataLimits, pass_of
from training.service.data.rollouts import Rollouts
from training.service.errors import Busy, Refused, ServiceError
from training.service.identity import OBJECT_HEADER, Caller, Identities, name_of
from training.service.journal import Journal, Pushed
from training.service.messages import Numbered, decoded
from training.service.metrics import TrainerMetrics
from training.service.models import Models
from training.service.publishing import Publisher
from training.service.sampling import Sampling
from training.service.wire import MAX_BODY_BYTES, PROTOBUF, body_of, parsed_request, scored_body

_POLL_S = 20.0  # the SDK asks again after 45 s
_MAX_POLLS = 2048  # of a tenant
_UPLOADS = 4  # bodies with data that are in memory, of a tenant
_SWEEP_S = 30.0
_LEAST_FREE_BYTES = 256 * 1024**2  # of the disk
_ENDED = "the executor has ended"
_DATUMS = 256  # of a chunk

T = TypeVar("T")
Handler = Callable[[Request, Caller], Awaitable[Any]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    base_name: str  # of the model, at the router
    folder: Path  # of the log, checkpoints and snapshots
    router: str  # its URL
    secret: str = field(repr=False)  # by which the router knows this trainer
    status_at: tuple[str, int] | None = None  # where /metrics, /health and /ready are
    executor: ExecutorOptions = field(default_factory=ExecutorOptions)
    max_rank: int = 64
    context_length: int | None = None  # of the engines; None: of the model
    share_of: Callable[[str], Share] = lambda _tenant: Share()  # of tenants
    model_name: str | None = None  # of the model, for clients; None: `base_name`
    router_tls: Callable[[], ssl.SSLContext | bool] = lambda: True  # with what its certificate is checked


class Service:
    """The routes. The folder is one process's only (`server.py`)."""

    def __init__(self, base: LoadedBase, identities: Identities, options: ServiceOptions) -> None:
        self._options, self._identities = options, identities
        self._journal = Journal(options.folder / "commands.db")
        turns = Turns(options.share_of)
        self.metrics = TrainerMetrics()
        self._commands = Commands(
            self._journal, base, options.base_name, options.folder, options.executor, turns, self.metrics
        )
        if base.model.device.type == "cuda":
            self._commands.executor.rehearse(options.max_rank)
        self._to_sweep, folder = asyncio.Event(), options.folder
        self._publisher = Publisher(self._commands, options.router, options.secret, self._to_sweep, options.router_tls)
        name = self._model_name = options.model_name or options.base_name
        self._checkpoints = Checkpoints(self._journal, self._commands.models, name, folder)
        self._models = Models(
            self._commands, self._publisher, self._checkpoints, base.sizes, name, options.max_rank, self._to_sweep
        )
        context_length = options.context_length or base.sizes.context_length or options.executor.row_tokens
        self._rollouts = Rollouts(folder / "rollouts.db")
        self._sampling = Sampling(options.router, options.base_name, context_length, self._rollouts, options.router_tls)
        self._limits = DataLimits(base.sizes.vocabulary, options.executor.row_tokens)
        self._watch()
        self._polls: Counter[str] = Counter()  # by tenant
        self._uploads: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_UPLOADS))

    def _watch(self) -> None:
        executor, journal, folder, started_s = self._commands.executor, self._journal, self._options.folder, time.time()
        self.metrics.watch(
            executor.states,
            model_bytes=lambda: executor.num_bytes,
            commands_kept=lambda: journal.total("commands"),
            sampler_aliases=lambda: journal.total("records", Pushed),
            log_bytes=lambda: sum(path.stat().st_size for path in folder.glob("commands.db*")),
            free_disk_bytes=lambda: shutil.disk_usage(folder).free,
            start_time_seconds=lambda: started_s,
        )

    def app(self) -> Starlette:
        models = self._models
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "create_session": self._json(messages.CreateSession, models.create_session),
            "session_heartbeat": self._json(messages.SessionHeartbeat, models.heartbeat),
            "sessions/{session}/finish": self._finish_session,
            "telemetry": self._telemetry,
            "create_model": self._json(messages.CreateModel, models.create),
            "load_weights": self._json(messages.LoadWeights, models.load),
            "get_info": self._json(messages.GetInfo, models.info),
            "weights_info": self._json(messages.WeightsInfo, self._checkpoints.weights_info),
            "forward_backward": self._forward_backward,
            "optim_step": self._numbered(messages.OptimStep, models.step),
            "save_weights": self._numbered(messages.SaveWeights, models.save),
            "save_weights_for_sampler": self._numbered(messages.SaveWeightsForSampler, models.export),
            "create_sampling_session": self._json(messages.CreateSamplingSession, models.create_sampler),
            "asample": self._asample,
            "retrieve_future": self._retrieve_future,
        }
        gets: dict[str, Handler] = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "training_runs": self._runs,
            "training_runs/{run}": self._run,
            "training_runs/{run}/checkpoints": self._checkpoints_of_run,
            "checkpoints": self._all_checkpoints,
        }
        one = "training_runs/{run}/checkpoints/{kind}/{name}"
        puts: dict[str, Handler] = {f"{one}/ttl": self._set_ttl}
        deletes: dict[str, Handler] = {one: self._delete_checkpoint}
        routes = [
            Route(f"/api/v1/{path}", self._answering(each), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets), ("PUT", puts), ("DELETE", deletes))
            for path, each in handlers.items()
        ]
        routes += [
            Route("/api/v1/healthz", self._health),
            Route("/models", self._answering(self._list_models, is_operators=True)),
            Route("/models/{model}", self._answering(self._stop_model, is_operators=True), methods=["DELETE"]),
            Route("/tenants", self._answering(self._list_tenants, is_operators=True)),
            Route("/tenants/{tenant}", self._answering(self._remove_tenant, is_operators=True), methods=["DELETE"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._commands.start(self._publisher.publish)
        try:
            async with meanwhile(self._sweep()), self._serving_status():
                yield
        finally:
            await self._sampling.stop()
            await self._publisher.stop()
            await self._commands.stop()
            self._journal.close()
            self._rollouts.close()

    def _serving_status(self) -> AbstractAsyncContextManager[None]:
        async def health(_request: web.Request) -> web.Response:
            """For probes: a new process helps against an executor that has ended, not against a full disk."""
            is_alive = self._commands.executor.is_alive
            return web.json_response({"status": "alive" if is_alive else _ENDED}, status=200 if is_alive else 503)

        if (address := self._options.status_at) is None:
            return contextlib.nullcontext()
        return serving_status(self.metrics.registry, {"/health": health, "/ready": health}, *address)

    async def _sweep(self) -> None:
        while True:
            try:
                await self._models.sweep(time.monotonic())
                self._sampling.keep(self._models.sessions)
            except Exception:
                log.exception("sessions were not looked through")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._to_sweep.wait(), _SWEEP_S)

    def _answering(self, handler: Handler, *, is_operators: bool = False) -> Callable[[Request], Awaitable[Response]]:
        """Maps errors to answers, here only."""

        async def answer(request: Request) -> Response:
            try:
                if is_operators:
                    await self._identities.check_operator(request)
                    caller = Caller("", None)
                else:
                    caller = await self._identities.caller(request)
                found = await handler(request, caller)
            except ServiceError as error:
                return JSONResponse({"error": str(error), "category": "user"}, error.status)
            except Exception:
                log.exception("a request failed", extra={"fields": {"path": request.url.path}})
                # Clients would repeat retrieve_future without pause after a 500.
                status = Busy.status if request.url.path.endswith("/retrieve_future") else 500
                return JSONResponse({"error": "the trainer's log has the reason", "category": "server"}, status)
            if isinstance(found, Response):
                return found
            return JSONResponse(found, headers={OBJECT_HEADER: found["model_id"]} if "model_id" in found else None)

        return answer

    async def _health(self, _request: Request) -> Response:
        status = "ok" if self._commands.executor.is_alive else _ENDED
        try:
            await asyncio.to_thread(self._journal.check)
            if (free := shutil.disk_usage(self._options.folder).free) < _LEAST_FREE_BYTES:  # the log may reuse its own
                status = f"the disk has {free} free bytes, fewer than {_LEAST_FREE_BYTES}; make room"
        except sqlite3.Error as error:
            status = f"the log cannot be written: {error}"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    def _json(self, kind: type[T], handle: Callable[[str, T], Awaitable[Any]]) -> Handler:
        async def handler(request: Request, caller: Caller) -> Any:
            return await handle(caller.tenant, decoded(await body_of(request), kind))

        return handler

    def _numbered(self, kind: type[T], make: Callable[[LiveModel, T], Operation]) -> Handler:
        """Of a JSON command. Once its number is known, what is wrong with it fails its future."""

        async def handler(request: Request, caller: Caller) -> Any:
            body = await body_of(request)
            numbered = decoded(body, Numbered)
            live = self._commands.model(caller.tenant, numbered.model_id)

            def operation() -> Operation:
                return make(live, decoded(body, kind))

            accepted = await self._commands.accept(live, numbered.seq_id, operation, key=caller.key)
            return {"request_id": accepted, "model_id": numbered.model_id}

        return handler

    # Handlers

    async def _client_config(self, request: Request, _caller: Caller) -> Any:
        decoded(await body_of(request), messages.ClientConfig)
        return {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": True,
            "fwdbwd_max_chunk_len": _DATUMS,
        }

    async def _finish_session(self, request: Request, caller: Caller) -> Any:
        await body_of(request)  # the reason is not kept
        await self._models.finish_session(caller.tenant, request.path_params["session"])
        return {}

    async def _telemetry(self, request: Request, _caller: Caller) -> Any:
        await body_of(request)  # not read
        return {"status": "accepted"}

    async def _capabilities(self, _request: Request, _caller: Caller) -> Any:
        name, row_tokens = self._model_name, self._options.executor.row_tokens
        found = {"model_name": name, "max_context_length": row_tokens, "trainable": True, "sampleable": True}
        return {"supported_models": [found]}

    async def _runs(self, request: Request, caller: Caller) -> Any:
        return self._models.runs(caller.tenant, *_page_of(request, 20))

    async def _run(self, request: Request, caller: Caller) -> Any:
        return self._models.run(caller.tenant, request.path_params["run"])

    async def _all_checkpoints(self, request: Request, caller: Caller) -> Any:
        return self._checkpoints.listed(caller.tenant, *_page_of(request, 100))

    async def _checkpoints_of_run(self, request: Request, caller: Caller) -> Any:
        tenant, run = caller.tenant, request.path_params["run"]
        self._models.run(tenant, run)
        return self._checkpoints.listed_of_run(tenant, run)

    async def _set_ttl(self, request: Request, caller: Caller) -> Any:
        asked = decoded(await body_of(request), messages.CheckpointTtl)
        await self._checkpoints.set_ttl(caller.tenant, *_path_of(request), asked)
        return Response(status_code=204)

    async def _forward_backward(self, request: Request, caller: Caller) -> Any:
        async with self._uploads[caller.tenant]:
            parsed = await asyncio.to_thread(parsed_request, await body_of(request, MAX_BODY_BYTES))
            live = self._commands.model(caller.tenant, parsed.model_id)

            def make() -> Pass:
                sampled = partial(self._rollouts.find, caller.tenant)
                return pass_of(parsed, live.model.spec.positions, self._limits, live.earlier, sampled)

            is_of_gradient = not parsed.forward_only
            accepted = await self._commands.accept(live, parsed.seq_id, make, is_of_gradient=is_of_gradient)
            return {"request_id": accepted, "model_id": parsed.model_id}

    async def _delete_checkpoint(self, request: Request, caller: Caller) -> Any:
        await self._checkpoints.delete(self._checkpoints.get(caller.tenant, *_path_of(request)))
        return Response(status_code=204)

    async def _list_models(self, _request: Request, _caller: Caller) -> Any:
        return {"models": await self._models.described()}

    async def _stop_model(self, request: Request, _caller: Caller) -> Any:
        await self._models.stop(request.path_params["model"])
        return Response(status_code=204)

    async def _list_tenants(self, _request: Request, _caller: Caller) -> Any:
        return {"tenants": sorted({name_of(each) for each in self._journal.tenants() | self._rollouts.tenants()})}

    async def _remove_tenant(self, request: Request, _caller: Caller) -> Any:
        """All of the name, but for the one whose lasting name is `kept`."""
        name, kept = request.path_params["tenant"], request.query_params.get("kept")

        def is_removed(tenant: str) -> bool:
            return name_of(tenant) == name and tenant != kept

        await self._models.remove_tenants(is_removed)
        if num_in_flight := self._sampling.num_in_flight(is_removed):
            raise Busy(f"{num_in_flight} requests are being sampled; try again in a moment")
        await asyncio.to_thread(self._rollouts.remove, is_removed)
        return Response(status_code=204)

    async def _sampler(self, request: Request, caller: Caller) -> Any:
        found = self._models.sampler(caller.tenant, request.path_params["sampler"])
        return {"sampler_id": found.id, "base_model": self._model_name, "model_path": found.path}

    async def _asample(self, request: Request, caller: Caller) -> Any:
        asked = decoded(await body_of(request), messages.Sample)
        sampler = self._models.sampler(caller.tenant, asked.sampling_session_id)
        request_id, names = self._sampling.start(sampler, asked, caller.key)
        return {"request_id": request_id, "sample_sequence_ids": names}

    async def _retrieve_future(self, request: Request, caller: Caller) -> Any:
        asked = decoded(await body_of(request), messages.RetrieveFuture)
        polls, tenant = self._polls, caller.tenant
        if polls[tenant] >= _MAX_POLLS:
            raise Busy(f"{polls[tenant]} requests wait for futures; ask again later")
        polls[tenant] += 1
        try:
            return await self._retrieved(asked.request_id, caller)
        finally:
            polls[tenant] -= 1

    async def _retrieved(self, request_id: str, caller: Caller) -> Any:
        found: Any
        if ":sample:" in request_id:
            self._models.sampler(caller.tenant, request_id.rpartition("#")[0])
            found = await self._sampling.result(request_id, _POLL_S)
        else:
            found = await self._commands.outcome(caller, request_id, _POLL_S)
        match found:
            case None:
                return {"type": "try_again", "request_id": request_id, **self._queue_state(caller.tenant)}
            case Failure(message=message, is_users=is_users):
                return {"error": message, "category": "user" if is_users else "server"}
            case Scored():
                return Response(scored_body(found), media_type=PROTOBUF)
            case Done(values=values):
                return values
            case _:
                return Response(found, media_type=PROTOBUF)

    def _queue_state(self, tenant: str) -> dict[str, str]:
        """The SDK logs what it is told of a pause."""
        if not (wait_s := self._commands.executor.wait_s(tenant)):
            return {"queue_state": "active"}
        why = f"{tenant} has used its training_tokens_per_min; it goes on in {math.ceil(wait_s)} s"
        return {"queue_state": "paused_capacity", "queue_state_reason": why}


def _page_of(request: Request, limit: int) -> tuple[int, int]:
    """(limit, offset), by default this limit. Raises Refused."""
    asked = {"limit": str(limit), "offset": "0"} | dict(request.query_params)
    for name in ("limit", "offset"):
        if not (asked[name].isdecimal() and len(asked[name]) < 10):
            raise Refused(f"{name} is {asked[name][:40]!r}; it is a number from 0")
    return int(asked["limit"]), int(asked["offset"])


def _path_of(request: Request) -> tuple[str, str]:
    """The path of the checkpoint that a request names, and its kind."""
    run, kind, name = (request.path_params[each] for each in ("run", "kind", "name"))
    return f"tinker://{run}/{kind}/{name}", kind
