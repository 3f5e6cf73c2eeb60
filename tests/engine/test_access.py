"""What opens an engine's HTTP server: SGLang's own, with our hooks, real certificates and no engine behind it."""

import os
import shutil
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.clusters.certificates import authority, expired, issued
from support.engines.fork_server import SGLANG
from support.waiting import wait_until

from engine.access import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from engine.hooks.report import DEVICE_VARIABLE
from process.certificates.authority import Authority
from process.certificates.contexts import make_client_context
from process.certificates.files import CertificateFiles
from process.free_ports import free_port

NAME = "d.decode.prelude.local"
ROUTERS, ADMIN = "routers-key", "admin-key"


@dataclass
class Guarded:
    port: int
    ca: Authority
    files: CertificateFiles
    router: CertificateFiles

    def ask(self, path: str, key: str = "", method: str = "POST", context: ssl.SSLContext | None = None) -> int:
        """The status of the answer. 500: it got through to an engine that is not there."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.HTTPTransport(verify=context or make_client_context(self.router))
        with httpx.Client(transport=transport, timeout=20) as client:
            url = f"https://127.0.0.1:{self.port}{path}"
            more = {"json": {}} if method == "POST" else {}
            return client.request(method, url, headers=headers, extensions={"sni_hostname": NAME}, **more).status_code

    def serial(self) -> str:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            context = make_client_context(self.router)
            with context.wrap_socket(connection, server_hostname=NAME) as tls:
                return str(tls.getpeercert()["serialNumber"])  # type: ignore[index]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Guarded]:
    ca = authority(tmp_path_factory.mktemp("access") / "certs")
    files, router = issued(ca, "decode", "d"), issued(ca, "router", "r")
    port = free_port()
    pid = SGLANG.start(
        Path(__file__).with_name("guarded_server.py"),
        str(port),
        *map(str, files),
        folder=str(tmp_path_factory.mktemp("output")),
        **{KEY_VARIABLE: ROUTERS, ADMIN_KEY_VARIABLE: ADMIN, DEVICE_VARIABLE: "cpu"},
    )
    try:
        wait_until(lambda: is_listening(port))
        yield Guarded(port, ca, files, router)
    finally:
        os.kill(pid, signal.SIGKILL)
        SGLANG.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("path", "method", "opened_by"),
    [
        ("/v1/completions", "POST", {ROUTERS}),
        ("/generate", "POST", {ROUTERS}),
        ("/abort_request", "POST", {ROUTERS}),
        ("/server_info", "GET", {ROUTERS}),
        ("/v1/loads", "GET", {ROUTERS}),
        ("/health_generate", "GET", {ROUTERS}),
        ("/load_lora_adapter", "POST", {ADMIN}),
        ("/unload_lora_adapter", "POST", {ADMIN}),
        ("/update_weights_from_disk", "POST", {ADMIN}),
        ("/flush_cache", "POST", {ADMIN}),
        ("/health", "GET", {ROUTERS, ADMIN, "", "guess"}),
    ],
)
def test_each_key_opens_what_it_is_for(guarded: Guarded, path: str, method: str, opened_by: set[str]):
    found = {
        key for key in (ROUTERS, ADMIN, "", "guess", "in-the-environment") if guarded.ask(path, key, method) != 401
    }
    assert found - {"in-the-environment"} == opened_by
    assert ("in-the-environment" in found) is ("guess" in opened_by)


def test_clients_without_a_certificate_of_the_cluster_get_nothing(guarded: Guarded, tmp_path: Path):
    anonymous = ssl.create_default_context(cafile=str(guarded.ca.certificate))
    other = make_client_context(issued(authority(tmp_path / "other"), "router", "r"))
    other.load_verify_locations(guarded.ca.certificate)
    for context in (anonymous, other, make_client_context(expired(guarded.ca, "old"))):
        with pytest.raises(httpx.TransportError):
            guarded.ask("/health", ROUTERS, "GET", context)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{guarded.port}/health", timeout=20)


def test_a_replaced_certificate_serves_the_next_handshake(guarded: Guarded):
    before = guarded.serial()
    new = issued(guarded.ca, "decode", "d", stem="new")
    shutil.move(new.key, guarded.files.key)
    shutil.move(new.certificate, guarded.files.certificate)
    wait_until(lambda: guarded.serial() != before)  # files are looked at once a second
    assert guarded.ask("/health", method="GET") != 401
