"""A real cluster, started as users start it: by `prelude up`, in processes of its own."""

import asyncio
import contextlib
import functools
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import yaml
from support.engines.running_engine import START_TIMEOUT_S
from support.logged_process import logged_process
from support.waiting import wait_until

from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.transport import Transport
from cluster.local.ports import with_ports
from process.certificates.contexts import make_pinned_context
from process.certificates.files import CertificateFiles

CHUNK_TOKENS = 64  # of prefill; prompts in the tests are shorter, equal and longer
ENGINE = {
    "device": "cpu",
    "max_total_tokens": 16384,
    "max_running_requests": 32,
    "chunked_prefill_tokens": CHUNK_TOKENS,
    "context_length": 2048,
}


@dataclass(frozen=True)
class RunningCluster:
    """What tests know of the cluster."""

    url: str
    model_dir: Path
    adapters: dict[str, Path]
    logs: Path
    config: Any
    supervisor: psutil.Process

    @functools.cached_property
    def verify(self) -> Any:
        """How a client knows the router, for httpx."""
        tls = self.config.router.tls
        return True if tls is None else make_pinned_context(CertificateFiles(tls.certificate, tls.key))

    @property
    def admin_url(self) -> str:
        """Base URL of the router's metrics and debug pages."""
        return f"http://{self.config.router.admin.host}:{self.config.router.admin_port}"

    def process(self, name: str) -> psutil.Process:
        """The agent of a worker, or the router."""
        for child in self.supervisor.children():
            words = child.cmdline()
            if (name == "router" and "router" in words) or ("--name" in words and name in words):
                return child
        raise LookupError(f"there is no process {name}")

    def engine(self, name: str) -> psutil.Process:
        """The SGLang server of a worker."""
        return next(child for child in self.process(name).children() if "engine.launch" in child.cmdline())

    def engine_parts(self, name: str) -> dict[str, psutil.Process]:
        """The server, the scheduler and the detokenizer of a worker's engine."""
        server = self.engine(name)
        found = {"server": server}
        for child in server.children(recursive=True):
            for part in ("scheduler", "detokenizer"):
                if f"sglang::{part}" in " ".join(child.cmdline()):
                    found[part] = child
        return found

    def wait_for_another(self, find: Callable[[], psutil.Process], old_pid: int, timeout_s: float) -> psutil.Process:
        """The process that has been started in the place of one that ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(LookupError, StopIteration, psutil.NoSuchProcess):
                if (process := find()).pid != old_pid:
                    return process
            time.sleep(0.1)
        raise TimeoutError(f"process {old_pid} was not replaced within {timeout_s:g} s")

    def ask_engine(self, name: str, method: str, path: str, *, key: str | None = None, **more: Any) -> httpx.Response:
        """Ask a worker's SGLang server, as routers do: for looking inside, never the way of a request.

        `key`: another one than the router's.
        """
        description = self.describe(name)
        key = description.engine_key if key is None else key
        transport = Transport.of(self.config, "router")
        tls = transport.engine_tls(self.config.workers[name].role, name)
        with httpx.Client(verify=True if tls is None else tls()[0], timeout=120) as client:
            extensions = {} if tls is None else {"sni_hostname": tls()[1]}
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return client.request(method, description.engine_url + path, headers=headers, extensions=extensions, **more)

    def describe(self, name: str, caller: str = "router") -> pb.WorkerDescription:
        """What an agent says of its worker to a router, or to `caller`."""
        worker = self.config.workers[name]

        async def call() -> pb.WorkerDescription:
            address = f"{worker.host}:{worker.control_port}"
            async with Transport.of(self.config, caller).channel(address, worker.role, name) as channel:
                return await WorkerControlStub(channel).Describe(pb.DescribeRequest(), timeout=120)

        return asyncio.run(call())

    @contextlib.contextmanager
    def control(self, name: str) -> Iterator[WorkerControlStub]:
        """An agent's control service, for an operator."""
        worker, transport = self.config.workers[name], Transport.of(self.config, "operator")
        address = f"{worker.host}:{worker.control_port}"
        if transport.files is None or transport.identity is None:
            connect = grpc.insecure_channel(address)
        else:
            certificate, key, ca = (path.read_bytes() for path in transport.files)
            server = transport.identity.peer(transport.certified_role(worker.role), name).dns
            options = (("grpc.ssl_target_name_override", server),)
            connect = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options)
        with connect as channel:
            yield WorkerControlStub(channel)

    def worker_url(self, name: str) -> str:
        """Base URL of an agent's metrics and readiness."""
        worker = self.config.workers[name]
        return f"http://{worker.host}:{worker.metrics_port}"

    def metric(self, series: str, worker: str = "") -> float:
        """The sum of the series that begin so, of a worker's agent or of the router; there is one."""
        page = httpx.get(f"{self.worker_url(worker) if worker else self.admin_url}/metrics", timeout=120).text
        assert f"\n{series}" in page
        return sum_of(page, series)

    def check_no_engine_ended(self) -> None:
        for name in self.config.workers:
            assert self.metric("prelude_worker_engine_restarts{", name) == 0, f"the engine of {name} died"

    def wait_ready(self, timeout_s: float) -> float:
        """Wait until the router and both workers are ready; the seconds that took."""
        urls = [f"{self.url}/ready", *(f"{self.worker_url(name)}/ready" for name in self.config.workers)]
        return wait_until(lambda: all(is_ready(url, self.verify) for url in urls), timeout_s)

    def loads(self) -> dict[str, tuple[int, int, int]]:
        """(running, queued, KV tokens of running requests) per worker, as its engine says."""
        loads = {}
        for name in self.config.workers:
            rank = self.ask_engine(name, "GET", "/v1/loads").json()["loads"][0]
            loads[name] = (rank["num_running_reqs"], rank["num_waiting_reqs"], rank["num_used_tokens"])
        return loads

    def wait_idle(self, timeout_s: float) -> float:
        """Wait until no engine has a request, or KV of one; the seconds that took."""
        return wait_until(lambda: not any(map(any, self.loads().values())), timeout_s)


def own_address() -> str | None:
    """An address of this host that others could reach."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family is socket.AF_INET and not each.address.startswith("127."):
                return each.address
    return None


def sum_of(metrics: str, series: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(series))


def is_ready(url: str, verify: Any = True) -> bool:
    try:
        return httpx.get(url, timeout=2, verify=verify).status_code == 200
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def running_cluster(
    root: Path, model_dir: Path, adapters: dict[str, Path], **sections: Any
) -> Iterator[RunningCluster]:
    """A cluster, ready, for as long as the context lasts: of one pair, unless `sections` of cluster.yaml say else."""
    data = {
        "model": {"path": str(model_dir), "name": "demo", "dtype": "float32", "tool_call_parser": "qwen25"},
        "engine": ENGINE,
        "router": {"port": 0, "max_body_bytes": 1024 * 1024},
        "workers": {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}},
        "adapters": {name: {"path": str(path)} for name, path in adapters.items()},
        **sections,
    }
    path = root / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    config = with_ports(load_cluster_config(path))  # chosen here, so that tests know them
    dump_cluster_config(config, path)
    command = [sys.executable, "-m", "cli.main", "up", "--config", path]
    with logged_process(command, root / "up.log", signal.SIGINT) as process:
        running = RunningCluster(
            url=f"http{'' if config.router.tls is None else 's'}://{config.router.host}:{config.router.port}",
            model_dir=model_dir,
            adapters=adapters,
            logs=root / "logs",
            config=config,
            supervisor=psutil.Process(process.pid),
        )
        running.wait_ready(START_TIMEOUT_S)
        yield running
