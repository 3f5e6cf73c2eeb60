"""Starts the routers that the relay benchmark compares, in front of the same mock workers."""

import asyncio
import contextlib
import importlib.util
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from adapters.scopes import Scope
from bench.errors import OptionInvalid, SystemFailed, WrongAnswer
from bench.measuring.http_load import http_load
from bench.systems.mock_worker import HOST, WorkerSettings
from cluster.config.load import load_cluster_config
from cluster.open_library import open_configured_catalog
from process.certificates.authority import Authority
from process.certificates.identity import Identity
from process.free_ports import free_port
from process.lifetime import die_with_parent

GATEWAY_VERSION = "0.3.2"
MODEL = "mock"
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2
_NUM_KEYS = 100  # of which one is used
_MOST = 1_000_000
# Of every kind, and out of reach.
_QUOTAS = {
    "fair_queue": None,
    "default": {
        "requests_per_s": _MOST,
        "prompt_tokens_per_min": 1000 * _MOST,
        "output_tokens_per_min": 1000 * _MOST,
        "sequences": _MOST,
    },
}
_FILES = (("certificate", "crt"), ("key", "key"))


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """What a load is sent to."""

    name: str
    port: int
    pid: int | None  # of the router's first process; None without a router
    key: str | None = None  # that its clients send
    tls: ssl.SSLContext | None = None  # of its clients


def workers(num_events: int, event_gap_s: float) -> dict[str, WorkerSettings]:
    """A prefill and a decode worker, on free ports. Prefill answers at once, a stream, too."""
    return {
        name: WorkerSettings(
            name=name,
            role=role,
            model=MODEL,
            engine_port=free_port(),
            control_port=free_port(),
            bootstrap_port=free_port(),
            warm_with=("decode-0",) if role == "prefill" else (),
            num_events=1 if role == "prefill" else num_events,
            event_gap_s=0.0 if role == "prefill" else event_gap_s,
        )
        for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"))
    }


def request_bytes(*, is_streaming: bool, num_events: int, key: str | None = None) -> bytes:
    """A chat request as a client sends it, of about 50 tokens."""
    body = msgspec.json.encode(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello " * 50}],
            "stream": is_streaming,
            "max_tokens": num_events,
        }
    )
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    authorization = b"" if key is None else b"authorization: Bearer %s\r\n" % key.encode()
    return head % (HOST.encode(), len(body)) + authorization + b"\r\n" + body


@contextlib.contextmanager
def running_workers(settings: dict[str, WorkerSettings], logs: Path) -> Iterator[None]:
    """Run the mock workers during the context."""
    with contextlib.ExitStack() as stack:
        for name, each in settings.items():
            words = [sys.executable, "-m", "bench.systems.mock_worker", msgspec.json.encode(each).decode()]
            stack.enter_context(_process(words, logs / f"{name}.log"))
        yield


def our_config(
    settings: dict[str, WorkerSettings], folder: Path, router: dict[str, Any], **sections: Any
) -> tuple[int, Path]:
    """The port and the cluster.yaml of Prelude's router in front of these workers; `router` is that section."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 1024}
    config |= {"intermediate_size": 128, "num_attention_heads": 4}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    router = {"host": HOST, "port": free_port(), "admin": {"port": free_port()}, **router}
    cluster = {
        "model": {"path": str(folder), "name": MODEL},
        "router": router,
        "workers": {
            name: {"role": each.role, "host": HOST, "control_port": each.control_port}
            for name, each in settings.items()
        },
        **sections,
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return router["port"], path


@contextlib.asynccontextmanager
async def our_router(settings: dict[str, WorkerSettings], folder: Path) -> AsyncIterator[RunningSystem]:
    """`prelude router`, in its default configuration."""
    port, path = our_config(settings, folder / "ours", {})
    async with _prelude("ours", port, path) as router:
        yield router


@contextlib.asynccontextmanager
async def _prelude(
    name: str, port: int, config: Path, key: str | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[RunningSystem]:
    words, log = [sys.executable, "-m", "cli.main", "router", "--config", str(config)], config.parent / "router.log"
    with _process(words, log) as process:
        await _until_it_answers(name, process, port, log, key, tls)
        yield RunningSystem(name, port, process.pid, key, tls)


def _new_key(config: Path) -> str:
    """A key for the cluster, beside others."""
    catalog = open_configured_catalog(load_cluster_config(config))
    for number in range(_NUM_KEYS):
        _, key = catalog.keys.create("bench", f"key {number}", {Scope.INFER}, expires_at=None, by=None)
    catalog.close()
    return key


@contextlib.asynccontextmanager
async def protected_router(settings: dict[str, WorkerSettings], folder: Path) -> AsyncIterator[RunningSystem]:
    """`prelude router` with TLS and keys for its clients, quotas, and mutual TLS with workers of its own."""
    certs = Authority(folder)
    certs.init()  # makes the folder
    own = {}
    for worker, each in settings.items():
        certificate, key = certs.issue(Identity(each.role, worker))
        ports = {field: free_port() for field in ("engine_port", "control_port", "bootstrap_port")}
        own[worker] = msgspec.structs.replace(each, tls=(str(certificate), str(key), str(certs.certificate)), **ports)
    certificate, key = certs.issue(Identity("router", "router"), hosts=(HOST,))
    clients = {"certificate": str(certificate), "key": str(key)}
    cluster = {"ca": str(certs.certificate), **{field: str(folder / f"{{name}}.{end}") for field, end in _FILES}}
    section = {"tls": clients, "auth": {}, "quotas": _QUOTAS}
    port, path = our_config(own, folder, section, tls=cluster)
    client_key = _new_key(path)
    context = ssl.create_default_context(cafile=str(certs.certificate))
    with running_workers(own, folder):
        async with _prelude("ours_protected", port, path, client_key, context) as router:
            yield router


@contextlib.asynccontextmanager
async def sglang_gateway(
    python: str, settings: dict[str, WorkerSettings], folder: Path
) -> AsyncIterator[RunningSystem]:
    """SGLang's Rust gateway, with a prefill and a decode worker."""
    prefill, decode = settings["prefill-0"], settings["decode-0"]
    port = free_port()
    words = [python, "-m", "sglang_router", "launch", "--host", HOST, "--port", str(port), "--pd-disaggregation"]
    words += ["--prefill", f"http://{HOST}:{prefill.engine_port}", str(prefill.bootstrap_port)]
    words += ["--decode", f"http://{HOST}:{decode.engine_port}", "--policy", "random"]
    words += ["--prometheus-port", str(free_port())]
    with _process(words, folder / "sglang_router.log") as process:
        await _until_it_answers("sglang_router", process, port, folder / "sglang_router.log")
        yield RunningSystem("sglang_router", port, process.pid)


def gateway_python(given: str | None) -> str | None:
    """A Python that can import the gateway's package: the given one or this one. None if this one lacks it.

    Raises OptionInvalid if the given one lacks it, or has another version.
    """
    if given is None:
        if importlib.util.find_spec("sglang_router") is None:
            return None
        given = sys.executable
    words = [given, "-c", "import importlib.metadata as m; print(m.version('sglang-router'))"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except OSError as error:
        raise OptionInvalid(f"--sglang-router {given}: {error.strerror}; name a Python interpreter") from error
    found = done.stdout.strip() or "none"
    if found != GATEWAY_VERSION:
        raise OptionInvalid(
            f"{given} has sglang-router {found}; the comparison is with {GATEWAY_VERSION}: "
            f"pip install sglang-router=={GATEWAY_VERSION} in an environment of its own"
        )
    return given


@contextlib.contextmanager
def _process(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that ends with this one; its output goes to the log."""
    root = Path(__file__).parents[2]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=die_with_parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _until_it_answers(
    name: str,
    process: subprocess.Popen[bytes],
    port: int,
    log: Path,
    key: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Wait until a router answers a request. Raises SystemFailed."""
    request = request_bytes(is_streaming=False, num_events=1, key=key)
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
    while True:
        try:
            await http_load(port, request, 1, 1, num_events=0, timeout_s=5, tls=tls)
            return
        except (SystemFailed, WrongAnswer) as error:
            if asyncio.get_running_loop().time() > deadline or process.poll() is not None:
                raise SystemFailed(f"{name} does not serve: {error}\n{_end_of(log)}") from error
        await asyncio.sleep(_POLL_S)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:]
