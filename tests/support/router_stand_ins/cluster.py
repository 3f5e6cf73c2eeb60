"""A real router in this process, over stand-ins of workers."""

import asyncio
import json
import re
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import openai
import uvicorn
from support.constants import with_constants
from support.router_stand_ins import adapters as adapters_of_tests
from support.router_stand_ins.adapters import DIRECTORIES, FINGERPRINT, MODEL, REVISION_ID, VOCABULARY, managed_adapters
from support.router_stand_ins.worker import WorkerStandIn

from cluster.config.discovery import DiscoveryConfig
from cluster.config.router import RouterConfig
from cluster.config.schema import AdapterConfig, RoleChangeMode
from cluster.control.transport import Transport
from cluster.discovery.source import StaticList, WorkerSource
from process.certificates.contexts import Following, make_pinned_context, make_server_context, server_context
from process.certificates.files import CertificateFiles
from process.tracing.span import Tracing
from router.api.training import TrainerAddress
from router.app import ServedModel, build_app
from router.fleet.fleet import Fleet
from router.fleet.fleet_state import Homes, WorkerView
from router.http.client_connection import client_protocol
from router.http.connections import ClientConnections, ConnectionLimits
from router.http.tls_handshake import tls_client_protocol
from router.metrics import Metrics
from router.revisions.adapter_service import AdapterService


def check_error(status: int, body: bytes) -> None:
    """Whatever a test is about: errors have OpenAI's form, with a message and a code."""
    if status < 400 or "ready" in (answer := json.loads(body)):
        return
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert all(error[name] for name in ("message", "type", "code")), error


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

    @property
    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    async def post(self, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any, Mapping[str, str]]:
        """Status, parsed answer and headers."""
        asked = {"model": MODEL, **fields}
        async with self.http.post(f"{self.url}{path}", json=asked) as response:
            check_error(response.status, await response.read())
            return response.status, await response.json(), response.headers

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[bytes]:
        """The data of every event."""
        body = {"model": MODEL, "stream": True, **fields}
        async with self.http.post(f"{self.url}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            data = await response.read()
        assert data.endswith(b"\n\n")
        return [event.removeprefix(b"data: ") for event in data.split(b"\n\n")[:-1]]

    async def get(self, path: str, url: str | None = None) -> tuple[int, Any]:
        async with self.http.get(f"{url or self.url}{path}") as response:
            check_error(response.status, await response.read())
            return response.status, await response.json()

    async def admin(self, path: str) -> tuple[int, Any]:
        """As `get`, of the admin listener."""
        return await self.get(path, self.admin_url)

    async def open(self, first: bytes, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of a client that sends this."""
        port = int(self.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
        writer.write(first)
        return reader, writer

    async def metrics_page(self) -> str:
        async with self.http.get(f"{self.admin_url}/metrics") as response:
            return await response.text()

    async def num_queued(self) -> int:
        """Requests that wait for their turn, by the router's metric."""
        (found,) = re.findall(r"^prelude_router_queued_requests (\S+)", await self.metrics_page(), re.MULTILINE)
        return int(float(found))

    @property
    def workers(self) -> list[WorkerStandIn]:
        return self.prefill + self.decode + self.unified

    @property
    def num_bodies(self) -> list[int]:
        """How many requests each worker's engine has got."""
        return [len(worker.engine.bodies) for worker in self.workers]

    def view(self, worker: str) -> WorkerView:
        """A worker as the router sees it now."""
        return self.fleet.state.workers[worker]

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

    async def is_idle(self) -> None:
        """Wait until no request is in flight."""
        await eventually(lambda: self.admin("/debug/requests"), lambda answer: answer[1] == {"requests": []})

    async def has_phase(self, phase: str) -> Any:
        """Wait until some sequence is in this phase; returns what is said of all requests."""

        def is_there(answer: tuple[int, Any]) -> bool:
            return any(each["phase"] == phase for request in answer[1]["requests"] for each in request["sequences"])

        return (await eventually(lambda: self.admin("/debug/requests"), is_there))[1]["requests"]


def post_bytes(path: str = "/v1/completions", *headers: str, **fields: Any) -> bytes:
    """A request with a body of these fields, as it is sent."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


def _bound() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio then sets TCP_NODELAY
    listener.bind(("127.0.0.1", 0))
    return listener


class _Server(uvicorn.Server):
    """uvicorn's, which looks ten times a second whether it should stop: tests stop hundreds of them."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


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
    directories: Mapping[str, Path | AdapterConfig] = DIRECTORIES,
    client_tls: Following[ssl.SSLContext] | None = None,
    certificates: Callable[[str, str], CertificateFiles] | None = None,  # by role and name: mutual TLS between all
    tracing: Tracing | None = None,
    sources: Sequence[WorkerSource] = (),
    discovery: DiscoveryConfig = DiscoveryConfig(),
    shares_quotas: bool = False,
    role_changes: RoleChangeMode = "off",
    max_engine_connections: int = 1000,
    max_running_requests: int = 64,
    trainer: TrainerAddress | None = None,
    **config: Any,
) -> AsyncIterator[ClusterStandIn]:
    """A ready router on a free port, with workers. Its catalog and store are in `folder`, or a temporary one."""
    router_config = with_constants(RouterConfig, port=0, **config)

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
            ServedModel(
                name=MODEL,
                vocabulary=VOCABULARY,
                fingerprint=FINGERPRINT,
                max_adapter_bytes=adapters_of_tests.LIMITS.max_bytes,
                max_expert_rank=adapters_of_tests.LIMITS.max_expert_rank,
                max_running_requests=max_running_requests,
            ),
            adapters=adapters,
            metrics=metrics,
            shares_quotas=shares_quotas,
            role_changes=role_changes,
            admin=admin,
            sources=[StaticList({worker.name: (worker.role, worker.address) for worker in workers}), *sources],
            discovery=discovery,
            transport=Transport(
                None if certificates is None else certificates("router", "router"),
                roles_change=role_changes in ("manual", "auto"),
            ),
            max_engine_connections=max_engine_connections,
            random=_Zeros(),
            tracing=tracing,
            trainer=trainer,
        )
        listener = _bound()
        connections = ClientConnections(ConnectionLimits.of(router_config))
        clear = client_protocol(connections)
        protocol = clear if client_tls is None else tls_client_protocol(connections, server_context(client_tls))
        timeouts: Any = {"timeout_keep_alive": 75, "timeout_graceful_shutdown": drain_timeout_s}
        quiet = {"log_config": None, "access_log": False}
        server = _Server(uvicorn.Config(app, http=protocol, ws="none", lifespan="on", **timeouts, **quiet))
        serving = asyncio.create_task(server._serve([listener]))
        pinned = True if client_tls is None else make_pinned_context(client_tls.files)
        connector = aiohttp.TCPConnector(ssl=pinned)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        url = f"http{'' if client_tls is None else 's'}://127.0.0.1:{listener.getsockname()[1]}"
        admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}"
        cluster = ClusterStandIn(url, admin_url, prefill, decode, unified, server, http, adapters, app.fleet, folder)
        try:
            await eventually(lambda: asyncio.sleep(0, server.started), bool, within_s=120)
            await cluster.warm()
            expected = num_prefill * num_decode + num_unified

            def is_complete(answer: tuple[int, Any]) -> bool:
                page = answer[1]
                return len(page["placements"]) == expected and all(each["ready"] for each in page["workers"].values())

            await eventually(lambda: cluster.admin("/ready"), is_complete, within_s=120)
            yield cluster
        finally:
            server.should_exit = True
            await serving


async def eventually(
    ask: Callable[[], Awaitable[Any]], is_right: Callable[[Any], bool], within_s: float = 120.0
) -> Any:
    """Poll until the answer is right, ever more rarely, since asking takes time. Fails with the last answer."""
    deadline = asyncio.get_running_loop().time() + within_s
    pause_s = 0.005
    while True:
        answer = await ask()
        if is_right(answer):
            return answer
        assert asyncio.get_running_loop().time() < deadline, f"still {answer!r} after {within_s} s"
        await asyncio.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.1)


def repository_root() -> Path:
    return Path(__file__).resolve().parents[3]
