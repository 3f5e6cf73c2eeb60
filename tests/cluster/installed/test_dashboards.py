"""Every query of every dashboard on a real Prometheus, which scrapes a real cluster under load.

`PRELUDE_PICTURES=docs/images` keeps what is drawn from these data, after a longer load.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import prometheus_client
import pytest
from support.clusters.running_cluster import RunningCluster
from support.observability.dashboard_pictures import draw
from support.observability.prometheus import Prometheus, running_prometheus, tool

from cluster.config.quotas import QuotasConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.http import ENGINE_METRICS_PATH
from observability import registry
from observability.alerts.rules import recorded_names
from observability.dashboards import DASHBOARDS
from observability.generate import generated_files
from observability.panels import Query
from observability.queries import names_in, scoped
from process.certificates.expiry import export_expiry
from process.certificates.validity import Validity
from router.identity.principal import Principal
from router.metrics import Metrics
from router.quotas.quotas import Quotas

pytestmark = pytest.mark.slow

PICTURES = os.environ.get("PRELUDE_PICTURES")
WINDOW = "15s"  # for $__rate_interval, with a scrape each second
MAX_REQUESTS = 3000
LONGEST_S = 150.0
STAND_IN = {"prelude_certificate_expiry_timestamp_seconds", "prelude_router_quota_used_ratio"}
QUERIES = [(each.uid, panel.title, query) for each in DASHBOARDS for panel in each.panels for query in panel.queries]


class Load:
    """A few clients that ask until they are stopped: with and without adapters, streams and whole answers."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._left = threading.Semaphore(MAX_REQUESTS)
        self._stop = threading.Event()
        self.statuses: list[int] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(4)]
        threads.append(threading.Thread(target=self._load_again))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)

    def _ask(self, seed: int) -> None:
        generator = random.Random(seed)
        with httpx.Client(base_url=self._cluster.url, timeout=60) as client:
            while not self._stop.is_set() and self._left.acquire(blocking=False):
                prompt = [generator.randrange(10, 600) for _ in range(generator.choice((4, 30, 90)))]
                body = {"model": "demo", "prompt": prompt, "max_tokens": generator.choice((4, 12)), "ignore_eos": True}
                name = generator.choice(["", "a0", "a0", "a1", "reft", "mixed", "nobody"])
                body |= {"adapter": name} if name else {}
                body |= {"stream": generator.random() < 0.6}
                self.statuses.append(client.post("/v1/completions", json=body).status_code)

    def _load_again(self) -> None:
        """Evict an adapter from all tiers and ask for it, again and again, so that there are cold loads."""
        worker = self._cluster.config.workers["prefill-0"]
        body = {"model": "demo", "adapter": "a3", "prompt": [11, 12], "max_tokens": 2}
        with (
            grpc.insecure_channel(f"{worker.host}:{worker.control_port}") as channel,
            httpx.Client(base_url=self._cluster.url, timeout=60) as client,
        ):
            control = WorkerControlStub(channel)
            while not self._stop.wait(1):
                answer = client.post("/v1/completions", json=body)
                self.statuses.append(answer.status_code)
                evict = pb.EvictAdapterRequest(revision_id=answer.headers["x-prelude-revision"], from_disk=True)
                with contextlib.suppress(grpc.RpcError):  # refused while its lease lasts
                    control.EvictAdapter(evict, timeout=10)


def targets_of(cluster: RunningCluster) -> dict[str, list[str]]:
    workers = list(cluster.config.workers)
    addresses = {
        "prelude-router": [cluster.admin_url],
        "prelude-workers": [cluster.worker_url(name) for name in workers],
        "prelude-engines": [cluster.worker_url(name) + ENGINE_METRICS_PATH for name in workers],
    }
    return {job: [url.partition("//")[2] for url in urls] for job, urls in addresses.items()}


@contextlib.contextmanager
def page_of_what_is_not_configured() -> Iterator[str]:
    """The metrics that this cluster lacks, as it has neither TLS nor quotas, by the product's own exporters."""
    own, metrics = prometheus_client.CollectorRegistry(), Metrics()
    limits = {"tenants": {"acme": {"requests_per_s": 100, "sequences": 8}}}
    Quotas(QuotasConfig.model_validate(limits), metrics).of_caller(Principal("acme", "acme", frozenset()))
    own.register(metrics.quota_use)
    ends = {"cluster": 90, "clients": 20}
    export_expiry(own, lambda: {name: Validity(0, time.time() + days * 86400) for name, days in ends.items()})
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry=own)
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def has_data(prometheus: Prometheus, query: Query, since: float) -> bool:
    """Whether a panel that begins at `since` would show anything."""
    expression = scoped(query.expression, 'namespace=~".*"').replace("$__rate_interval", WINDOW)
    found = prometheus.query_range(expression, since, time.time(), step_s=2)
    return any(math.isfinite(float(value)) for each in found for _, value in each["values"])


def may_be_empty(query: Query) -> bool:
    """Whether it is about events that a healthy cluster does not see. Such panels have a second query, with zeros."""
    if "or vector(0)" in query.expression:
        return False
    names = names_in(query.expression) - recorded_names()
    return 'result!="ok"' in query.expression or any(registry.series()[name].absent_until for name in names - STAND_IN)


def test_every_query_returns_data(cluster: RunningCluster, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(generated_files()["rules.yaml"].replace("interval: 1m", "interval: 1s"))
    tool("prometheus")
    load = Load(cluster)
    with page_of_what_is_not_configured() as stand_in:
        targets = {**targets_of(cluster), "prelude-stand-in": [stand_in]}
        with running_prometheus(tmp_path, targets, rules) as prometheus, load.running():
            began_at = time.time()
            missing = [each for each in QUERIES if not may_be_empty(each[2])]
            while missing and time.time() - began_at < LONGEST_S:
                time.sleep(1)  # the scrape interval
                missing = [each for each in missing if not has_data(prometheus, each[2], began_at)]
            if PICTURES:
                time.sleep(max(0.0, began_at + 120 - time.time()))
            answered = prometheus.query_range("min(max_over_time(up[10m]))", time.time(), time.time(), step_s=1)
            assert [value for each in answered for _, value in each["values"]] == ["1"], prometheus.targets()
            assert not missing, "\n".join(f"{uid}, {title}: {query.expression}" for uid, title, query in missing)
            for _, _, query in QUERIES:
                has_data(prometheus, query, began_at)  # also those without data are valid
            names = prometheus.names()
            used = {name for _, _, query in QUERIES for name in names_in(query.expression)} - recorded_names()
            absent = {name for name in used - names if not registry.series()[name].absent_until}
            assert not absent, f"a healthy cluster under load has no {sorted(absent)}"
            check_rules(prometheus)
            pictures = Path(PICTURES or tmp_path)
            for dashboard in DASHBOARDS if PICTURES else DASHBOARDS[:1]:
                path = pictures / f"{dashboard.uid}.png"
                draw(dashboard, prometheus, path, start=began_at, end=time.time(), step_s=2, window=WINDOW)
                assert path.stat().st_size > 10_000
    assert set(load.statuses) == {200, 404}


def check_rules(prometheus: Prometheus) -> None:
    """All rules were evaluated without an error."""
    groups = httpx.get(f"{prometheus.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    broken = {
        rule["name"]: rule.get("lastError") for group in groups for rule in group["rules"] if rule["health"] == "err"
    }
    assert not broken
    assert len([rule for group in groups for rule in group["rules"]]) > 50
