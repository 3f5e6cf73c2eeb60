"""Stand-ins for an engine's HTTP API and a worker's control service, over real sockets.

They imitate the behaviour of SGLang 0.5.17 as observed, to test how the router handles failures of workers. They prove
nothing about SGLang, KV or adapters: tests/engine and tests/cluster do.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import math
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import grpc
import uvicorn
from aiohttp import web
from support.described_answers import Described

from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterError
from adapters.formats import Limits as AdapterLimits
from adapters.formats import read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import open_store
from cluster.config.discovery import DiscoveryConfig
from cluster.config.router import RouterConfig
from cluster.control import control_pb2 as control
from cluster.control.control_pb2_grpc import WorkerControlServicer, add_WorkerControlServicer_to_server
from cluster.control.transport import PLAIN, Transport
from cluster.discovery.source import WorkerSource
from process.certificates.contexts import Following, make_pinned_context, make_server_context, server_context
from process.certificates.files import CertificateFiles
from process.tracing.span import Tracing
from router.app import build_app
from router.fleet.fleet import Fleet
from router.fleet.homes import Homes
from router.http.client_connection import client_protocol
from router.http.connections import ClientConnections, ConnectionLimits
from router.metrics import Metrics
from router.protocol.field_values import Limits
from router.revisions.adapter_service import AdapterService
from samples.random_adapters import write_random_lora

MODEL = "base"
FINGERPRINT = "f00d"
VOCABULARY = 1000
WORDS = ("Hello", " wide", " world")

# ---- adapters: real ones, small -----------------------------------------------------------------------------------

LIMITS = AdapterLimits(max_rank=16, max_bytes=4 * 1024**2)
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
}


def _make_template() -> Path:
    """A base model's configuration, and adapters: a valid one, one for all positions, a damaged one."""
    folder = Path(tempfile.mkdtemp(prefix="prelude-router-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(_TINY))
    base = BaseModel.read(folder)
    write_random_lora(folder / "a0", base, seed=0)
    write_random_lora(folder / "everywhere", base, seed=1, config={"prelude": {"positions": "all"}})
    weights = write_random_lora(folder / "broken", base, seed=2) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    catalog = SqlCatalog.open(f"sqlite:///{folder / 'catalog.db'}")
    catalog.close()
    return folder


TEMPLATE = _make_template()
BASE = BaseModel.read(TEMPLATE)
REVISION_ID = revision_id_of(read_adapter(TEMPLATE / "a0", BASE, LIMITS))
EVERYWHERE_ID = revision_id_of(read_adapter(TEMPLATE / "everywhere", BASE, LIMITS))
DIRECTORIES = {name: TEMPLATE / name for name in ("a0", "everywhere", "broken")}  # of "cluster.yaml"


def open_catalog(url: str) -> SqlCatalog:
    return SqlCatalog.open(url)


def library_over(catalog: SqlCatalog, folder: Path) -> AdapterLibrary:
    """A library whose store is in a folder."""
    return AdapterLibrary(catalog, open_store(f"file://{folder / 'store'}"), BASE, LIMITS, "float32")


def managed_adapters(
    folder: Path, metrics: Metrics | None = None, *, catalog_url: str | None = None, **directories: Path
) -> AdapterService:
    """An AdapterService, not opened yet, whose catalog and store are in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if catalog_url is None:
        if not (folder / "catalog.db").exists():
            shutil.copy(TEMPLATE / "catalog.db", folder)  # a migrated one, because a migration takes a while
        catalog_url = f"sqlite:///{folder / 'catalog.db'}"
    return AdapterService(
        lambda: open_catalog(catalog_url),
        lambda catalog: library_over(catalog, folder),
        directories,
        metrics or Metrics(),
    )


Behaviour = Callable[["EngineStandIn", dict[str, Any], web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class EngineStandIn:
    """An engine's HTTP server. Each request consumes one of `behaviours`; one that returns None answers as usual."""

    role: str
    words: tuple[str, ...] = WORDS
    event_gap_s: float = 0.0
    behaviours: list[Behaviour] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    abort_events: dict[str, asyncio.Event] = field(default_factory=dict)
    num_running: int = 0
    key: str = ""  # that requests must have; "": none
    tls: ssl.SSLContext | None = None
    num_refused: int = 0  # for want of the key
    runner: web.AppRunner | None = None
    url: str = ""

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(body) for body in self.bodies]

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=64 * 1024**2, middlewares=[self._ask_for_key])
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/generate", self.handle)
        app.router.add_post("/v1/tokenize", self.tokenize)
        app.router.add_post("/v1/detokenize", self.detokenize)
        app.router.add_post("/abort_request", self.abort)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port, ssl_context=self.tls)
        await site.start()
        self.url = f"http{'' if self.tls is None else 's'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    @web.middleware
    async def _ask_for_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            self.num_refused += 1
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def stop(self) -> None:
        """Close all connections at once, as a killed process does."""
        if self.runner is not None:
            runner, self.runner = self.runner, None
            await runner.cleanup()

    async def abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        self.aborted.append(rid)
        if rid in self.abort_events:
            self.abort_events[rid].set()
        return web.Response()

    async def tokenize(self, request: web.Request) -> web.Response:
        """A number for each word."""
        self.bodies.append(await request.read())
        fields = await request.json()
        prompt = fields.get("prompt")
        if prompt is None:
            prompt = " ".join(str(message.get("content")) for message in fields["messages"])
        tokens = [list(range(len(each.split()))) for each in ([prompt] if isinstance(prompt, str) else prompt)]
        one = tokens[0] if isinstance(prompt, str) else tokens
        return web.json_response({"tokens": one, "count": len(one), "max_model_len": 2048})

    async def detokenize(self, request: web.Request) -> web.Response:
        """Words for numbers. A list of lists gives a list of texts."""
        tokens = (await request.json())["tokens"]
        are_many = tokens[:1] != [] and isinstance(tokens[0], list)
        texts = [" ".join(f"w{token}" for token in each) for each in (tokens if are_many else [tokens])]
        return web.json_response({"text": texts if are_many else texts[0]})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        fields = json.loads(body)
        self.abort_events[fields["rid"]] = asyncio.Event()
        self.num_running += 1
        try:
            if self.behaviours:
                response = await self.behaviours.pop(0)(self, fields, request)
                if response is not None:
                    return response
            if fields.get("stream"):
                return await self.stream(fields, request)
            return web.json_response(self.answer(fields), dumps=_dumps)
        finally:
            self.num_running -= 1

    def answer(self, fields: dict[str, Any], **choice: Any) -> dict[str, Any]:
        words = self.words[:1] if self.role == "prefill" else self.words
        if "token_ids_logprob" in fields:  # of /generate; label i has the probability 1 / (i + 2)
            labels = [[-math.log(i + 2), token_id, None] for i, token_id in enumerate(fields["token_ids_logprob"])]
            return {"text": words[0], "meta_info": {"prompt_tokens": 7, "output_token_ids_logprobs": [labels]}}
        choice = {"index": 0, "finish_reason": "stop", "matched_stop": None, "logprobs": None, **choice}
        if "messages" in fields:
            choice["message"] = {"role": "assistant", "content": "".join(words)}
        else:
            choice["text"] = "".join(words)
        return {
            "id": fields["rid"],
            "object": "chat.completion" if "messages" in fields else "text_completion",
            "created": 1,
            "model": fields["model"],
            "choices": [choice],
            "usage": usage(len(words)),
            "metadata": {"weight_version": "default"},
        }

    def events(self, fields: dict[str, Any]) -> list[bytes]:
        kind = "chat.completion.chunk" if "messages" in fields else "text_completion"
        head = {"id": fields["rid"], "object": kind, "created": 1, "model": fields["model"]}

        def choice(**values: Any) -> list[dict[str, Any]]:
            return [{"index": 0, "logprobs": None, "finish_reason": None, "matched_stop": None} | values]

        if "messages" in fields:
            parts = [choice(delta={"role": "assistant", "content": ""})]
            parts += [choice(delta={"content": word}) for word in self.words]
            parts += [choice(delta={}, finish_reason="stop")]
        else:
            parts = [choice(text=word) for word in self.words[:-1]]
            parts += [choice(text=self.words[-1], finish_reason="stop")]
        chunks = [{**head, "choices": part, "usage": None} for part in parts]
        if (fields.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": usage(len(self.words))})
        return [b"data: " + _dumps(chunk).encode() + b"\n\n" for chunk in chunks]

    async def stream(self, fields: dict[str, Any], request: web.Request, num_events: int = 10**9) -> web.StreamResponse:
        """Send the whole stream, or its first events only."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        events = self.events(fields)
        for event in events[:num_events]:
            if self.event_gap_s:
                await asyncio.sleep(self.event_gap_s)
            await response.write(event)
        if num_events >= len(events):
            await response.write(b"data: [DONE]\n\n")
        return response


def usage(num_completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 7,
        "total_tokens": 7 + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# ---- behaviours of an engine -----------------------------------------------------------------------------------


def answers(status: int, body: dict[str, Any] | None = None) -> Behaviour:
    """Answer with a status."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.Response:
        error = {"object": "error", "message": f"status {status}", "type": "x", "param": None, "code": status}
        return web.json_response(body or error, status=status, dumps=_dumps)

    return behave


async def drops(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
    """Close the connection without an answer, as a crash does."""
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(3600)


async def hangs(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.Response:
    """Send nothing until aborted, as an engine call does if its counterpart never arrives."""
    await engine.abort_events[fields["rid"]].wait()
    return web.json_response(engine.answer(fields, finish_reason="abort"), dumps=_dumps)


def breaks_after(num_events: int) -> Behaviour:
    """Stream some events, then crash."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        await engine.stream(fields, request, num_events)
        assert request.transport is not None
        await asyncio.sleep(0.05)  # flush what was written
        request.transport.abort()
        await asyncio.sleep(3600)

    return behave


def stops_after(num_events: int) -> Behaviour:
    """Stream some events, then send nothing more."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        await engine.stream(fields, request, num_events)
        await asyncio.sleep(3600)

    return behave


def streams(*events: bytes) -> Behaviour:
    """Stream exactly these bytes."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(0.05)
        return response

    return behave


def after(delay_s: float) -> Behaviour:
    """Answer as usual after a delay."""

    async def behave(engine: EngineStandIn, fields: dict[str, Any], request: web.Request) -> None:
        await asyncio.sleep(delay_s)

    return behave


# ---- workers ----------------------------------------------------------------------------------------------------


_ROLES = {"prefill": control.ROLE_PREFILL, "decode": control.ROLE_DECODE, "unified": control.ROLE_UNIFIED}


class WorkerStandIn(WorkerControlServicer):
    """An agent's control service with an engine behind it."""

    def __init__(self, name: str, role: str, transport: Transport = PLAIN) -> None:
        self.name = name
        self.transport = transport
        self.role = role
        self.domain = ""
        self.agent_id = f"{name}'s agent"
        self.described: dict[str, Any] = {}  # fields of its description that differ
        self.engine = EngineStandIn(role)
        self.state = control.WorkerState(incarnation=f"{name}-1", engine_state=control.ENGINE_STATE_UP, ready=True)
        self.resident: set[str] = set()
        self.pinned: set[str] = set()
        self.memory_only: dict[str, bytes] = {}  # content received by PutAdapter
        self.kept: set[str] = set()  # pinned ones of those
        self.unpinned: list[str] = []  # of those, in the order of the calls
        self.put_errors: list[grpc.StatusCode] = []  # one per call
        self.put_delay_s = 0.0
        self.keeps_deadlines = True
        self.num_chunks = 0  # of the last PutAdapter
        self.reports_residency = True
        self.evicted: list[tuple[str, bool]] = []
        self._deltas: list[control.ResidencyDelta] = []
        self.ensured: list[str] = []
        self.metadata: list[dict[str, Any]] = []  # of each EnsureAdapter
        self.prewarmed: list[str] = []  # those of `ensured` that were prewarms
        self.on_disk: set[str] = set()  # fetched for the disk tier
        self.not_in_engine: list[bool] = []  # the flag of each EnsureAdapter
        self.ensure_errors: list[AdapterError | grpc.StatusCode] = []  # one per call
        self.retry_after_s: float | None = None  # sent with every gRPC status of `ensure_errors`
        self.ensure_delay_s = 0.0
        self.has_no_store = False  # refuses what is neither resident nor memory-only
        self.sends_states = asyncio.Event()
        self.sends_states.set()
        self.address = ""
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        await self.engine.start()
        self._server = grpc.aio.server()
        add_WorkerControlServicer_to_server(self, self._server)
        self.address = f"{host}:{self.transport.add_port(self._server, f'{host}:{port}')}"
        await self._server.start()

    async def restart_agent(self) -> None:
        """Stop the agent, if it runs, and start it again at its address."""
        await self.stop_agent()
        self._deltas.clear()
        self._server = grpc.aio.server()
        add_WorkerControlServicer_to_server(self, self._server)
        self.transport.add_port(self._server, self.address)
        await self._server.start()

    async def stop(self) -> None:
        await self.engine.stop()
        await self.stop_agent()

    async def stop_agent(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def change(self, **values: Any) -> None:
        """Change the state and send it."""
        async with self._changed:
            for name, value in values.items():
                setattr(self.state, name, value)
            self._changed.notify_all()

    async def crash_engine(self) -> None:
        """The engine dies; its agent notices."""
        await self.engine.stop()
        await self.change(engine_state=control.ENGINE_STATE_DOWN, ready=False, incarnation="", reason="engine died")

    async def Describe(self, request: Any, context: Any) -> control.WorkerDescription:
        fields = {
            "name": self.name,
            "role": _ROLES[self.role],
            "engine_url": self.engine.url,
            "kv_host": "10.0.0.1" if self.role == "prefill" else "",
            "kv_bootstrap_port": 8998 if self.role == "prefill" else 0,
            "model": MODEL,
            "domain": self.domain,
            "engine_key": self.engine.key,
            "agent_id": self.agent_id,
        }
        return control.WorkerDescription(**fields | self.described)

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[control.WorkerState]:
        residency = control.ResidencyDelta(
            snapshot=True, resident=sorted(self.resident), in_memory_only=sorted(self.memory_only)
        )
        num_sent = len(self._deltas)
        while True:
            await self.sends_states.wait()
            self.state.residency.CopyFrom(residency)
            yield self.state
            residency = control.ResidencyDelta()
            if num_sent < len(self._deltas):  # one at a time, in order
                residency, num_sent = self._deltas[num_sent], num_sent + 1
                continue
            async with self._changed:
                try:
                    async with asyncio.timeout(request.heartbeat_s):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def EnsureAdapter(self, request: Any, context: Any) -> control.EnsureAdapterResponse:
        self.ensured.append(request.revision_id)
        self.metadata.append(dict(context.invocation_metadata()))
        self.prewarmed += [request.revision_id] if request.prewarm else []
        self.not_in_engine.append(request.not_in_engine)
        is_late = await self._sleep(self.ensure_delay_s, request.deadline_s)
        if self.ensure_errors:
            error = self.ensure_errors.pop(0)
            if isinstance(error, grpc.StatusCode):
                metadata = () if self.retry_after_s is None else (("prelude-retry-after-s", str(self.retry_after_s)),)
                await context.abort(error, "no", trailing_metadata=metadata)
            metadata = (("prelude-error-code", error.code), ("prelude-http-status", str(error.http_status)))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error), trailing_metadata=metadata)
        if is_late:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
        if request.revision_id not in self.resident | self.memory_only.keys() and self.has_no_store:
            gone = (("prelude-error-code", "adapter_revision_not_stored"), ("prelude-http-status", "404"))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not stored", trailing_metadata=gone)
        if request.tier == control.TIER_DISK:
            self.on_disk.add(request.revision_id)
            await self.send_delta(on_disk=[request.revision_id])
            return control.EnsureAdapterResponse(load_s=0.25)
        load_s = 0.0 if request.revision_id in self.resident else 0.25
        if load_s:
            await self.make_resident(request.revision_id)
        return control.EnsureAdapterResponse(load_s=load_s)

    async def PutAdapter(self, request_iterator: Any, context: Any) -> control.PutAdapterResponse:
        parts = [part async for part in request_iterator]
        begin, content = parts[0].begin, b"".join(part.chunk for part in parts[1:])
        is_late = await self._sleep(self.put_delay_s, begin.deadline_s)
        if self.put_errors:
            await context.abort(self.put_errors.pop(0), "no")
        if is_late:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "late")
        assert hashlib.sha256(content).hexdigest() == begin.content_sha256
        assert begin.content_bytes == len(content)
        assert all(len(part.chunk) <= 1024**2 for part in parts)
        self.num_chunks = len(parts) - 1
        was_pinned = begin.revision_id in self.kept
        self.memory_only[begin.revision_id] = content
        self.kept.add(begin.revision_id)
        self.resident.add(begin.revision_id)
        if self.reports_residency:
            await self.send_delta(in_memory_only=[begin.revision_id], resident=[begin.revision_id])
        return control.PutAdapterResponse(load_s=0.25, was_pinned=was_pinned)

    async def _sleep(self, seconds: float, deadline_s: float) -> bool:
        """Simulate work. True if the deadline ended it; agents then report the cause, slightly after the deadline."""
        is_late = self.keeps_deadlines and seconds > deadline_s
        await asyncio.sleep(deadline_s + 0.05 if is_late else seconds)
        return is_late

    async def evict_memory_only(self, revision_id: str) -> None:
        """Drop a memory-only revision, as agents do to make room."""
        del self.memory_only[revision_id]
        self.kept.discard(revision_id)
        self.resident.discard(revision_id)
        await self.send_delta(not_in_memory_only=[revision_id], evicted=[revision_id])

    async def PinAdapter(self, request: Any, context: Any) -> control.PinAdapterResponse:
        if request.memory_only:
            (self.kept.add if request.pinned else self.kept.discard)(request.revision_id)
            self.unpinned += [] if request.pinned else [request.revision_id]
            return control.PinAdapterResponse()
        if request.pinned:
            self.pinned.add(request.revision_id)
            await self.make_resident(request.revision_id)
        else:
            self.pinned.discard(request.revision_id)
        return control.PinAdapterResponse()

    async def EvictAdapter(self, request: Any, context: Any) -> control.EvictAdapterResponse:
        if request.revision_id in self.pinned:
            metadata = (("prelude-error-code", "adapter_in_use"), ("prelude-http-status", "409"))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "it is pinned", trailing_metadata=metadata)
        self.evicted.append((request.revision_id, request.from_disk))
        was_there = request.revision_id in self.resident
        self.resident.discard(request.revision_id)
        await self.send_delta(evicted=[request.revision_id])
        return control.EvictAdapterResponse(evicted=was_there)

    async def make_resident(self, revision_id: str) -> None:
        self.resident.add(revision_id)
        await self.send_delta(resident=[revision_id])

    async def send_delta(self, **delta: Any) -> None:
        """Send a change of residency."""
        self._deltas.append(control.ResidencyDelta(**delta))
        await self.change()


@dataclass
class ClusterStandIn:
    """A running router with its workers."""

    url: str
    admin_url: str
    prefill: list[WorkerStandIn]
    decode: list[WorkerStandIn]
    unified: list[WorkerStandIn]
    server: uvicorn.Server
    http: aiohttp.ClientSession
    adapters: AdapterService
    fleet: Fleet
    folder: Path  # of the catalog and the store
    described: Described

    async def post(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any, Mapping[str, str]]:
        """Status, parsed answer and headers."""
        asked = {"model": MODEL, **fields}
        async with self.http.post(f"{self.url}{path}", json=asked) as response:
            self._check("POST", path, response, await response.read(), asked)
            return response.status, await response.json(), response.headers

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[bytes]:
        """The data of every event."""
        body = {"model": MODEL, "stream": True, **fields}
        async with self.http.post(f"{self.url}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            data = await response.read()
        self._check("POST", path, response, data, body)
        assert data.endswith(b"\n\n")
        return [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}{path}") as response:
            self._check("GET", path, response, await response.read())
            return response.status, await response.json()

    async def admin(self, path: str) -> tuple[int, Any]:
        """As `get`, of the admin listener."""
        async with self.http.get(f"{self.admin_url}{path}") as response:
            media_type, body = response.headers.get("content-type", ""), await response.read()
            self.described.admin.check("GET", path.partition("?")[0], response.status, media_type, body)
            return response.status, await response.json()

    def _check(self, method: str, path: str, response: aiohttp.ClientResponse, body: bytes, fields: Any = None) -> None:
        """Whatever a test is about, what it asks and gets must be as the OpenAPI document says."""
        media_type = response.headers.get("content-type", "")
        self.described.check(method, path.partition("?")[0], response.status, media_type, body, fields)

    @property
    def workers(self) -> list[WorkerStandIn]:
        return self.prefill + self.decode + self.unified

    async def warm(self) -> None:
        """Make every prefill worker report all pairs with the current decode engines as warm."""
        for worker in self.prefill:
            del worker.state.warm_pairs[:]
            for other in self.decode:
                worker.state.warm_pairs.add(decode_name=other.name, decode_incarnation=other.state.incarnation)
            await worker.change()

    @property
    def prefill_by_affinity(self) -> list[WorkerStandIn]:
        """The prefill workers, the first home of REVISION_ID first."""
        order = Homes([worker.name for worker in self.prefill]).order(REVISION_ID)
        return [self.prefill[index] for index in order]

    async def is_ready(self, expected: bool = True) -> None:
        await eventually(lambda: self.get("/ready"), lambda answer: (answer[0] == 200) is expected)


def _bound() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio then sets TCP_NODELAY
    listener.bind(("127.0.0.1", 0))
    return listener


class _Zeros(Random):
    """Of equal workers, placement takes the first by name."""

    def getrandbits(self, k: int) -> int:
        return 0


@asynccontextmanager
async def running_cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    num_unified: int = 0,
    *,
    drain_timeout_s: float = 1,
    folder: Path | None = None,
    catalog_url: str | None = None,
    directories: Mapping[str, Path] = DIRECTORIES,
    client_tls: Following[ssl.SSLContext] | None = None,
    certificates: Callable[[str, str], CertificateFiles] | None = None,  # by role and name: mutual TLS between all
    tracing: Tracing | None = None,
    sources: Sequence[WorkerSource] = (),
    discovery: DiscoveryConfig = DiscoveryConfig(),
    shares_quotas: bool = False,
    **config: Any,
) -> AsyncIterator[ClusterStandIn]:
    """A ready router on a free port, with workers. Its catalog and store are in `folder`, or a temporary one."""
    router_config = RouterConfig(port=0, **config)

    def stand_in(role: str, name: str) -> WorkerStandIn:
        if certificates is None:
            return WorkerStandIn(name, role)
        files = certificates(role, name)
        worker = WorkerStandIn(name, role, Transport(files))
        worker.engine.key, worker.engine.tls = f"key of {name}", make_server_context(files)
        return worker

    prefill = [stand_in("prefill", f"p{i}") for i in range(num_prefill)]
    decode = [stand_in("decode", f"d{i}") for i in range(num_decode)]
    unified = [stand_in("unified", f"u{i}") for i in range(num_unified)]
    workers = [*prefill, *decode, *unified]
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prelude-router-tests-")))
        metrics = Metrics()
        adapters = managed_adapters(folder, metrics, catalog_url=catalog_url, **directories)
        adapters.open()
        admin = _bound()
        app = build_app(
            router_config,
            model=MODEL,
            vocabulary=VOCABULARY,
            fingerprint=FINGERPRINT,
            adapters=adapters,
            metrics=metrics,
            max_adapter_bytes=LIMITS.max_bytes,
            shares_quotas=shares_quotas,
            workers={worker.name: (worker.role, worker.address) for worker in workers},
            admin=admin,
            sources=sources,
            discovery=discovery,
            transport=PLAIN if certificates is None else Transport(certificates("router", "router")),
            random=_Zeros(),
            tracing=tracing,
        )
        listener = _bound()
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=client_protocol(ClientConnections(ConnectionLimits.of(router_config))),
                timeout_keep_alive=75,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                ssl_context_factory=None
                if client_tls is None
                else lambda _config, _default: server_context(client_tls),
                timeout_graceful_shutdown=drain_timeout_s,  # type: ignore[arg-type]
            )
        )
        serving = asyncio.create_task(server._serve([listener]))
        pinned = True if client_tls is None else make_pinned_context(client_tls.files.certificate)
        connector = aiohttp.TCPConnector(ssl=pinned)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        url = f"http{'' if client_tls is None else 's'}://127.0.0.1:{listener.getsockname()[1]}"
        admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}"
        described = Described(Limits(router_config.max_choices, VOCABULARY))
        cluster = ClusterStandIn(
            url, admin_url, prefill, decode, unified, server, http, adapters, app.fleet, folder, described
        )
        try:
            await eventually(lambda: asyncio.sleep(0, server.started), bool, within_s=30)
            await cluster.warm()
            expected = num_prefill * num_decode + num_unified

            def is_complete(answer: tuple[int, Any]) -> bool:
                page = answer[1]
                return len(page["placements"]) == expected and all(each["ready"] for each in page["workers"].values())

            await eventually(lambda: cluster.admin("/ready"), is_complete, within_s=30)
            yield cluster
        finally:
            server.should_exit = True
            await serving


async def eventually(ask: Callable[[], Awaitable[Any]], is_right: Callable[[Any], bool], within_s: float = 30.0) -> Any:
    """Poll until the answer is right. Fails with the last answer."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        answer = await ask()
        if is_right(answer):
            return answer
        assert asyncio.get_running_loop().time() < deadline, f"still {answer!r} after {within_s} s"
        await asyncio.sleep(0.02)


def repository_root() -> Path:
    return Path(__file__).resolve().parents[2]
