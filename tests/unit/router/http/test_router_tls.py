"""TLS for clients of the router, with real certificates and sockets: reload without a restart or a dropped stream."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clusters.certificates import authority, issued
from support.router_stand_ins import ClusterStandIn, eventually, running_cluster

from process.certificates.authority import Authority
from process.certificates.contexts import Following, make_pinned_context, make_server_context
from process.certificates.files import CertificateFiles

BODY = {"model": "base", "prompt": "x", "stream": True, "max_tokens": 3}


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path / "certs")


def trusting(by: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(by.certificate))


async def serial_of(url: str, context: ssl.SSLContext) -> str:
    """Which certificate a new connection gets."""
    host, _, port = url.removeprefix("https://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    serial = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return serial


def replace(files: CertificateFiles, by: CertificateFiles) -> None:
    shutil.move(by.key, files.key)
    shutil.move(by.certificate, files.certificate)


class TestClients:
    @asynccontextmanager
    async def cluster(self, ca: Authority) -> AsyncIterator[ClusterStandIn]:
        self.files = issued(ca, "router", "router", hosts=("localhost", "127.0.0.1"))
        self.clock = [0.0]
        clients = Following(CertificateFiles(self.files.certificate, self.files.key), make_server_context)
        clients._clock, clients._looked_at = lambda: self.clock[0], 0.0
        async with running_cluster(client_tls=clients) as cluster:
            assert cluster.url.startswith("https://")
            yield cluster

    async def test_clients_verify_the_router_and_get_answers_and_streams(self, ca: Authority, tmp_path: Path):
        async with self.cluster(ca) as cluster:
            connector = aiohttp.TCPConnector(ssl=trusting(ca))
            async with aiohttp.ClientSession(connector=connector) as http:
                body = {**BODY, "stream": False}
                async with http.post(f"{cluster.url}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                async with http.post(f"{cluster.url}/v1/completions", json=BODY) as answer:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            for wrong in (trusting(authority(tmp_path / "other")), ssl.create_default_context()):
                with pytest.raises(ssl.SSLCertVerificationError):
                    await serial_of(cluster.url, wrong)
            assert await serial_of(cluster.url, make_pinned_context(self.files))
            plain = cluster.url.replace("https", "http")
            with pytest.raises(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(f"{plain}/health"):
                    pass

    @pytest.mark.slow
    async def test_a_new_certificate_serves_new_connections_and_drops_no_stream(self, ca: Authority):
        """Sixteen streams run while the certificate is replaced four times."""
        async with self.cluster(ca) as cluster:
            decode = cluster.decode[0].engine
            decode.words, decode.event_gap_s = tuple(f" w{number}" for number in range(60)), 0.02
            connector = aiohttp.TCPConnector(ssl=trusting(ca), limit=0)
            async with aiohttp.ClientSession(connector=connector) as http:

                async def stream() -> bytes:
                    async with http.post(f"{cluster.url}/v1/completions", json=BODY) as answer:
                        assert answer.status == 200
                        return await answer.read()

                streams = [asyncio.create_task(stream()) for _ in range(16)]
                await eventually(lambda: asyncio.sleep(0, decode.num_running), lambda running: running == 16)
                serials = [await serial_of(cluster.url, trusting(ca))]
                for number in range(4):
                    new = issued(ca, "router", "router", stem=f"new-{number}", hosts=("localhost", "127.0.0.1"))
                    replace(self.files, new)
                    self.clock[0] += 2
                    serials.append(await serial_of(cluster.url, trusting(ca)))
                assert not any(each.done() for each in streams)
                assert len(set(serials)) == 5
                texts = await asyncio.gather(*streams)
            assert all(text.count(b"data: ") == 61 and text.endswith(b"[DONE]\n\n") for text in texts)


class TestEngines:
    """The router and engines beyond loopback: HTTPS with certificates of both, and the engine's key."""

    def cluster(self, ca: Authority, **config: Any) -> AbstractAsyncContextManager[ClusterStandIn]:
        return running_cluster(certificates=lambda role, name: issued(ca, role, name), **config)

    @pytest.mark.slow
    async def test_requests_streams_and_aborts_carry_the_key(self, ca: Authority):
        async with self.cluster(ca) as cluster:
            status, _, _ = await cluster.post(prompt="x")
            assert status == 200
            assert (await cluster.stream(prompt="x"))[-1] == b"[DONE]"
            status, answer, _ = await cluster.post(prompt=[1], echo=True, max_tokens=0)
            assert status == 200, answer
            decode = cluster.decode[0].engine
            decode.event_gap_s = 5.0
            async with cluster.http.post(f"{cluster.url}/v1/completions", json=BODY) as response:
                assert response.status == 200
                await response.content.readany()
            await eventually(lambda: asyncio.sleep(0, len(decode.aborted)), bool)
            for worker in cluster.workers:
                assert worker.engine.url.startswith("https://")
                assert worker.engine.num_refused == 0
                for headers in worker.engine.headers:
                    lower = {name.lower(): value for name, value in headers.items()}
                    assert lower["authorization"] == f"Bearer {worker.engine.key}"

    async def test_clients_keys_never_reach_engines_nor_theirs_clients(self, ca: Authority):
        async with self.cluster(ca) as cluster:
            headers = {"authorization": "Bearer of a client"}
            body = {"model": "base", "prompt": "x"}
            async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                text = str(answer.headers) + await answer.text()
            for worker in cluster.workers:
                assert "of a client" not in str(worker.engine.headers)
                assert worker.engine.key not in text
            _, page = await cluster.get("/ready")
            assert "key of" not in str(page)

    async def test_an_engine_with_another_workers_certificate_gets_no_request(self, ca: Authority):
        """As if somebody had taken a worker's address, with a certificate and key of the cluster."""
        async with self.cluster(ca, max_attempts=1) as cluster:
            other = make_server_context(issued(ca, "decode", "d7"))
            engine = cluster.decode[0].engine
            port = int(engine.url.rpartition(":")[2])
            await engine.stop()
            engine.tls = other
            await engine.start(port)
            engine.bodies.clear()
            status, answer, _ = await cluster.post(prompt="x")
            assert status == 502, answer
            assert engine.bodies == []

    async def test_a_restarted_engine_with_a_new_key_is_no_error_of_the_client(self, ca: Authority):
        """The router's key is stale until its stream comes back: a failure of the worker, which others can take."""
        async with self.cluster(ca, num_prefill=0, num_decode=0, num_unified=2) as cluster:
            stale, other = cluster.unified
            stale.engine.key = "new"
            for _ in range(4):
                status, answer, _ = await cluster.post(prompt="x")
                assert status == 200, answer
            assert stale.engine.num_refused >= 1
            await stale.restart_agent()

            async def answered() -> bool:
                count = len(stale.engine.bodies)
                await cluster.post(prompt="x")
                return len(stale.engine.bodies) > count

            await other.change(ready=False)
            await eventually(answered, bool)
