"""A pair of real engines beyond loopback, with TLS everywhere: clients, control, engines, and KV ports for peers."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from support.clusters.certificates import authority, issued
from support.clusters.running_cluster import RunningCluster, own_address, running_cluster

pytestmark = pytest.mark.long

REQUEST = {"model": "demo", "prompt": "The sea", "max_tokens": 8, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def secured(tmp_path_factory, model_dir: Path, adapters: dict[str, Path]) -> Iterator[RunningCluster]:
    address = own_address()
    if address is None:
        pytest.skip("this host has no address beyond loopback")
    root = tmp_path_factory.mktemp("secured")
    certs = authority(root / "certs")
    issued(certs, "router", "router", stem="router", hosts=(address,))
    issued(certs, "operator", "operator", stem="operator")
    issued(certs, "unified", "stranger", stem="stranger")
    for role in ("prefill", "decode"):
        issued(certs, role, f"{role}-0", stem=f"{role}-0")
    tls = {"certificate": "certs/router.crt", "key": "certs/router.key"}
    sections = {
        "router": {"host": address, "port": 0, "insecure": True, "tls": tls},  # nobody has to authenticate here
        "workers": {f"{role}-0": {"role": role, "host": address} for role in ("prefill", "decode")},
        "tls": {"ca": "certs/ca.crt", "certificate": "certs/{name}.crt", "key": "certs/{name}.key"},
    }
    with running_cluster(root, model_dir, {"a0": adapters["a0"]}, **sections) as cluster:
        yield cluster


def test_requests_pass_through_tls_at_every_step(secured: RunningCluster):
    assert secured.url.startswith("https://")
    for more in ({}, {"adapter": "a0"}, {"stream": True}):
        answer = httpx.post(f"{secured.url}/v1/completions", json=REQUEST | more, timeout=60, verify=secured.verify)
        assert answer.status_code == 200, answer.text
    for name in ("prefill-0", "decode-0"):
        assert secured.describe(name).engine_url.startswith("https://")
        assert secured.ask_engine(name, "GET", "/v1/loads").status_code == 200
        assert secured.ask_engine(name, "GET", "/v1/loads", key="guess").status_code == 401


def test_engines_talk_to_nobody_without_a_certificate(secured: RunningCluster):
    for name in ("prefill-0", "decode-0"):
        description = secured.describe(name)
        headers = {"authorization": f"Bearer {description.engine_key}"}
        anonymous = ssl.create_default_context(cafile=str(secured.config.tls.ca))
        anonymous.check_hostname = False
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{description.engine_url}/health", headers=headers, verify=anonymous)
        with pytest.raises(httpx.TransportError):
            httpx.get(description.engine_url.replace("https", "http") + "/health", headers=headers)


def test_keys_are_told_to_those_who_send_requests(secured: RunningCluster):
    assert secured.describe("decode-0", "router").engine_key
    assert secured.describe("decode-0", "prefill-0").engine_key == secured.describe("decode-0", "router").engine_key
    assert secured.describe("prefill-0", "decode-0").engine_key == ""
    assert secured.describe("prefill-0", "operator").engine_key == ""


def test_kv_ports_are_on_the_workers_address(secured: RunningCluster):
    """Not on every interface, and not on one that SGLang picks."""
    address = secured.config.workers["prefill-0"].host
    for name in ("prefill-0", "decode-0"):
        process = secured.engine(name)
        listening = {
            connection.laddr.ip
            for each in (process, *process.children(recursive=True))
            for connection in each.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert address in listening
        environment = process.environ()
        assert environment["SGLANG_HOST_IP"] == address
        assert environment["PRELUDE_ENGINE_KV_PEERS"] == address
