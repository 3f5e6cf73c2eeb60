"""Every query of every dashboard on a real Prometheus, which scrapes a real cluster under load."""

import contextlib
import math
import random
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.clusters.certificates import authority, issued
from support.clusters.running_cluster import RunningCluster
from support.logged_process import logged_process
from support.observability.dashboards import DASHBOARDS, FILES, RECORDED, names_of, runnable
from support.observability.prometheus import Prometheus, running_prometheus, tool
from support.ports import two_ports
from support.training.trainer import RawClient, data, make_service, served
from support.waiting import wait_until

from adapters.catalog.records import Grant
from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Permission, Scope
from cluster.config.load import dump_cluster_config
from cluster.config.router import RouterConfig
from cluster.config.schema import ClusterConfig
from cluster.config.workers import ENGINE_METRICS_PATH
from cluster.control import control_pb2 as pb
from observability import registry
from process.certificates.contexts import make_pinned_context
from process.certificates.files import CertificateFiles
from process.free_ports import free_port
from training.runs.base import load_base

pytestmark = pytest.mark.slow

WINDOW = "15s"  # for $__rate_interval, with a scrape each second
MAX_REQUESTS = 3000
LONGEST_S = 150.0
# Events that this load does not bring about. Such panels have a second query, with zeros.
UNSEEN = {
    "prelude_router_retries_total",  # an attempt failed
    "prelude_router_stream_errors_total",
    "prelude_router_split_requests_total",  # no alias is split
    "prelude_router_split_time_to_first_token_seconds_bucket",
    "prelude_router_split_time_per_output_token_seconds_bucket",
    "prelude_worker_adapter_loads_total",  # for its other results: a load failed
}
# The first of the tenants exceeds its rate.
QUOTAS = {
    "tenants": {"acme": {"requests_per_s": 0.5}, "beta": {"requests_per_s": 100, "sequences": 64}},
    "fair_queue": {"max_requests": 200, "timeout_s": 110},
}
QUERIES = [
    (each["uid"], panel["title"], query["expr"])
    for each in DASHBOARDS
    for panel in each["panels"]
    for query in panel["targets"]
]

SCOPES = frozenset(Scope) - {Scope.ADMIN}


@dataclass(frozen=True)
class TenantsRouter:
    """A second router of the cluster, for tenants: keys, quotas, turns, TLS and management of adapters."""

    config: ClusterConfig
    keys: dict[str, str]  # by tenant

    @property
    def admin_url(self) -> str:
        return f"http://{self.config.router.admin.host}:{self.config.router.admin_port}"

    def client(self, tenant: str) -> httpx.Client:
        """A client with the tenant's key, or for an unknown tenant with a wrong one."""
        tls = self.config.router.tls
        assert tls is not None
        return httpx.Client(
            base_url=f"https://{self.config.router.host}:{self.config.router.port}",
            verify=make_pinned_context(CertificateFiles(tls.certificate, tls.key)),
            headers={"authorization": f"Bearer {self.keys.get(tenant, 'pl_of_nobody')}"},
            timeout=120,
        )


@contextlib.contextmanager
def tenants_router(cluster: RunningCluster, quotas: dict[str, object]) -> Iterator[TenantsRouter]:
    """The router, ready. Its tenants, those that `quotas` names, may use the adapters of cluster.yaml."""
    root = cluster.logs.parent / "tenants"
    issued(authority(root), "router", "tenants", stem="router")
    config = cluster.config.model_copy(
        update={
            "router": RouterConfig.model_validate(
                {
                    "port": free_port(),
                    "admin": {"port": free_port()},
                    "auth": {},
                    "quotas": quotas,
                    "tls": {"certificate": str(root / "router.crt"), "key": str(root / "router.key")},
                    "management": True,
                }
            )
        }
    )
    path = cluster.logs.parent / "tenants.yaml"  # beside cluster.yaml, and so with its catalog and store
    dump_cluster_config(config, path)
    assert config.router.quotas is not None
    router = TenantsRouter(config, _keys(config.catalog.url, config.router.quotas.tenants))
    with logged_process([sys.executable, "-m", "cli.main", "router", "--config", path], root / "router.log"):
        wait_until(lambda: _is_ready(router))
        yield router


def _keys(catalog_url: str, tenants: Iterable[str]) -> dict[str, str]:
    catalog = SqlCatalog.open(catalog_url)
    keys = {}
    try:
        for tenant in tenants:
            _, keys[tenant] = catalog.keys.create(tenant, "test", SCOPES, expires_at=None, by="test")
            for permission in Permission:
                catalog.grants.add(Grant("default", None, tenant, permission), by="test")
    finally:
        catalog.close()
    return keys


def _is_ready(router: TenantsRouter) -> bool:
    try:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(router.client(tenant)) for tenant in router.keys]
            return httpx.get(f"{router.admin_url}/ready", timeout=2).status_code == 200 and all(
                client.get("/v1/models").status_code == 200 for client in clients
            )
    except httpx.HTTPError:
        return False


class Load:
    """A few clients that ask until they are stopped: with and without adapters, streams and whole answers.

    Some ask the cluster's router, some the one for tenants, where one exceeds its quota and one has no valid key.
    """

    def __init__(self, cluster: RunningCluster, tenants: TenantsRouter) -> None:
        self._cluster, self._tenants = cluster, tenants
        self._left = threading.Semaphore(MAX_REQUESTS)
        self._stop = threading.Event()
        self.statuses: dict[str, set[int]] = {}  # by the tenant that asked, "" at the cluster's router

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        jobs: list[tuple[Any, ...]] = [(self._ask, "", seed) for seed in range(3)]
        jobs += [(self._ask, tenant, 10 + seed) for seed, tenant in enumerate(("acme", "beta", "nobody"))]
        jobs += [(self._burst, "beta", 20), (self._change, "acme", 30)]
        jobs += [(self._load_again,)]
        with ThreadPoolExecutor(len(jobs)) as threads:
            clients = [threads.submit(self._until_stopped, *each) for each in jobs]
            try:
                yield
            finally:
                self._stop.set()
        for client in clients:
            client.result()  # an error of it: a client that ended leaves panels empty

    def _until_stopped(self, job: Callable[..., None], *arguments: Any) -> None:
        """Go on after an answer that does not come: a busy machine may be that slow."""
        while not self._stop.is_set():
            with contextlib.suppress(httpx.TimeoutException):
                return job(*arguments)

    def _client(self, tenant: str) -> httpx.Client:
        return self._tenants.client(tenant) if tenant else httpx.Client(base_url=self._cluster.url, timeout=60)

    def _note(self, tenant: str, status: int) -> None:
        self.statuses.setdefault(tenant, set()).add(status)

    def _ask(self, tenant: str, seed: int) -> None:
        generator = random.Random(seed)
        name = "nobody"  # an unknown adapter first, while the tenant's quota lasts
        with self._client(tenant) as client:
            while not self._stop.is_set() and self._left.acquire(blocking=False):
                prompt = [generator.randrange(10, 600) for _ in range(generator.choice((4, 30, 90)))]
                body = {"model": "demo", "prompt": prompt, "max_tokens": generator.choice((4, 12)), "ignore_eos": True}
                body |= {"adapter": f"default/{name}" if tenant else name} if name else {}
                body |= {"stream": generator.random() < 0.6}
                status = client.post("/v1/completions", json=body).status_code
                self._note(tenant, status)
                name = generator.choice(["", "a0", "a0", "a1", "reft", "mixed", "nobody"])
                # Panels need some requests of every kind, each scrape, and no full load.
                self._stop.wait(0.5 if status in (401, 429) else 0.1)

    def _burst(self, tenant: str, seed: int) -> None:
        """More sequences at once than the engines run, so that requests wait for their tenant's turn."""
        body = {"model": "demo", "prompt": [seed] * 9, "max_tokens": 24, "ignore_eos": True, "n": 4}

        def one(_: int) -> None:
            with self._client(tenant) as client:
                self._note(tenant, client.post("/v1/completions", json=body).status_code)

        with ThreadPoolExecutor(10) as threads:
            while not self._stop.wait(5):
                list(threads.map(one, range(10)))

    def _change(self, tenant: str, number: int) -> None:
        """Import an adapter again and again, and end a connection with what is no request."""
        address = (self._tenants.config.router.host, self._tenants.config.router.port)
        with self._client(tenant) as client:
            while not self._stop.wait(2):
                folder = self._cluster.adapters["a1"]
                files = [("file", (each.name, each.read_bytes())) for each in folder.iterdir()]
                answer = client.post("/v1/adapters", data={"name": f"{tenant}/own-{number}"}, files=files)
                self._note(f"{tenant}, imports", answer.status_code)
                with (
                    contextlib.suppress(OSError),  # the router may reset it
                    socket.create_connection(address, 10) as raw,
                    unverified().wrap_socket(raw) as connection,
                ):
                    connection.sendall(b"this is no request\r\n\r\n")
                    connection.recv(1000)

    def _load_again(self) -> None:
        """Evict an adapter from all tiers and ask for it, again and again, so that there are cold loads."""
        body = {"model": "demo", "adapter": "a3", "prompt": [11, 12], "max_tokens": 2}
        with self._cluster.control("prefill-0") as control, self._client("") as client:
            while not self._stop.wait(1):
                answer = client.post("/v1/completions", json=body)
                self._note("", answer.status_code)
                evict = pb.EvictAdapterRequest(revision_id=answer.headers["x-prelude-revision"], from_disk=True)
                with contextlib.suppress(grpc.RpcError):  # refused while its lease lasts
                    control.EvictAdapter(evict, timeout=10)


@contextlib.contextmanager
def training(cluster: RunningCluster, folder: Path) -> Iterator[str]:
    """A trainer on the cluster's model that is sent commands all the time; host:port of its metrics."""
    may_end, port = threading.Event(), two_ports()
    base = load_base(cluster.config.model.path, "float32", "cpu")
    # Nobody takes its pushes: they take their time, and fail.
    service = make_service(base, folder, "http://127.0.0.1:9", status_at=("127.0.0.1", port))

    def train(client: RawClient) -> None:
        model, seq = client.model(), 1
        while not may_end.wait(0.5):
            client.result(client.forward_backward(model, seq, *data(1)))
            client.result(client.optim_step(model, seq + 1))
            sampler = {"seq_id": seq + 2, "sampling_session_seq_id": seq}
            client.error(client.post("save_weights_for_sampler", model_id=model, **sampler))
            seq += 3

    with served(service.app()) as url, ThreadPoolExecutor(1) as thread:
        trained = thread.submit(train, RawClient(url))
        try:
            yield f"127.0.0.1:{port}"
        finally:
            may_end.set()
        trained.result()


def unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def targets_of(cluster: RunningCluster, tenants: TenantsRouter, trainer: str) -> dict[str, list[str]]:
    workers = list(cluster.config.workers)
    addresses = {
        "prelude-router": [cluster.admin_url, tenants.admin_url],
        "prelude-workers": [cluster.worker_url(name) for name in workers],
        "prelude-engines": [cluster.worker_url(name) + ENGINE_METRICS_PATH for name in workers],
        "prelude-trainer": [f"http://{trainer}"],
    }
    return {job: [url.partition("//")[2] for url in urls] for job, urls in addresses.items()}


def has_data(prometheus: Prometheus, query: str, since: float) -> bool:
    """Whether a panel that begins at `since` would show anything."""
    found = prometheus.query_range(runnable(query, WINDOW), since, time.time(), step_s=2)
    return any(math.isfinite(float(value)) for each in found for _, value in each["values"])


def may_be_empty(query: str) -> bool:
    """Whether it is about events that this load does not bring about."""
    if "or vector(0)" in query:
        return False
    if "prelude_worker_adapter_loads_total" in query:
        return 'result!="ok"' in query
    return bool(names_of(query).keys() & UNSEEN)


def test_every_query_returns_data(cluster: RunningCluster, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text((FILES / "rules.yaml").read_text().replace("interval: 1m", "interval: 1s"))
    tool("prometheus")
    with tenants_router(cluster, QUOTAS) as tenants, training(cluster, tmp_path / "trainer") as trainer:
        load = Load(cluster, tenants)
        with running_prometheus(tmp_path, targets_of(cluster, tenants, trainer), rules) as prometheus, load.running():
            began_at = time.time()
            missing, looks = [each for each in QUERIES if not may_be_empty(each[2])], 0
            # On a busy machine one look at all can take as long, and its first queries come too early.
            while missing and (looks < 4 or time.time() - began_at < LONGEST_S):
                looks += 1
                time.sleep(1)  # the scrape interval
                missing = [each for each in missing if not has_data(prometheus, each[2], began_at)]
            answered = prometheus.query_range("min(max_over_time(up[10m]))", time.time(), time.time(), step_s=1)
            assert [value for each in answered for _, value in each["values"]] == ["1"]
            assert not missing, "\n".join(f"{uid}, {title}: {query}" for uid, title, query in missing)
            for _, _, query in QUERIES:
                has_data(prometheus, query, began_at)  # also those without data are valid
            names = prometheus.names()
            used = {name for _, _, query in QUERIES for name in names_of(query)} - RECORDED
            absent = {name for name in used - names if not registry.series()[name].absent_until}
            assert not absent, f"a healthy cluster under load has no {sorted(absent)}"
            check_rules(prometheus)
    assert load.statuses == {
        "": {200, 404}, "acme": {200, 404, 429}, "beta": {200, 404}, "nobody": {401}, "acme, imports": {201},
    }  # fmt: skip


def check_rules(prometheus: Prometheus) -> None:
    """All rules were evaluated without an error."""
    groups = httpx.get(f"{prometheus.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    broken = {
        rule["name"]: rule.get("lastError") for group in groups for rule in group["rules"] if rule["health"] == "err"
    }
    assert not broken
    assert len([rule for group in groups for rule in group["rules"]]) > 50
