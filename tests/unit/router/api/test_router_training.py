"""/api/v1: calls pass through to the trainer in the caller's name, in bounded memory, and no header is forged."""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from support.clusters.certificates import authority, issued
from support.router_stand_ins import ClusterStandIn, eventually, running_cluster, until
from support.routers.keyed_cluster import KeyedCluster, keyed_cluster

from adapters.scopes import Scope
from cluster.control.transport import Transport
from process.certificates.contexts import make_server_context
from process.free_ports import bound_socket
from router.api.training import TrainerAddress
from router.identity.access import Directory

SECRET = "the secret of router and trainer"
POLL = "/api/v1/retrieve_future"
MIB = 1024**2
LONG = 96 * MIB  # more than all buffers between a client and the trainer
JSON = b"content-type", b"application/json"


class Trainer:
    """An application that notes what it is asked, and answers when it may."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, dict[str, str], bytes]] = []  # method, target, headers, body
        self.num_open = self.num_begun = 0
        self.url, self.status, self.headers = "", 200, [JSON]
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.answer: Any = None  # in place of all this

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        self.num_open += 1
        try:
            await (self.answer or self._answer)(scope, receive, send)
        finally:
            self.num_open -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message["body"], message["more_body"]
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.calls.append((scope["method"], target.decode(), headers, body))
        waiting = [asyncio.ensure_future(each) for each in (receive(), self.may_answer.wait())]  # or the router leaves
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": b"{}"})


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Trainer]:
    trainer = Trainer()
    config = uvicorn.Config(trainer, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    config.load()
    config.ssl = tls
    listener, server = bound_socket(), uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    trainer.url = f"http{'' if tls is None else 's'}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        await until(lambda: server.started)
        yield trainer
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def routed(**config: Any) -> AsyncIterator[tuple[ClusterStandIn, Trainer]]:
    """A router that asks for no keys."""
    async with serving() as trainer:
        address = TrainerAddress(trainer.url, SECRET)
        async with running_cluster(0, 0, trainer=address, **config) as cluster:
            yield cluster, trainer


@asynccontextmanager
async def with_keys(folder: Path, **config: Any) -> AsyncIterator[tuple[KeyedCluster, Trainer]]:
    async with serving() as trainer:
        address = TrainerAddress(trainer.url, SECRET)
        async with keyed_cluster(folder, 0, 0, trainer=address, **config) as keyed:
            yield keyed, trainer


async def test_the_trainer_is_told_whose_call_it_is_and_nothing_else(tmp_path: Path):
    async with with_keys(tmp_path) as (keyed, trainer):
        key, body = await keyed.key("acme", {Scope.TRAIN}), os.urandom(3 * MIB)
        trainer.headers = [JSON, (b"x-prelude-object", b"s:train:0")]
        forged = {
            "x-api-key": f"tml-{key}", "x-prelude-tenant": "beta", "x-prelude-credential": "stolen", "Cookie": "a=b",
            "X-Prelude-Object": "forged", "Content-Encoding": "zstd", "Content-Type": "application/x-protobuf",
        }  # fmt: skip
        async with keyed.cluster.http.post(f"{keyed.cluster.url}/api/v1/x", data=body, headers=forged) as answer:
            assert (answer.status, await answer.read()) == (200, b"{}")
            assert [name in answer.headers for name in ("x-request-id", "x-prelude-object")] == [True, False]
        path = "/api/v1/../samplers/a%3Asample%2F..%2f1?limit=1&limit=%32"
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
        _, writer = await keyed.cluster.open(head.encode())
        await until(lambda: len(trainer.calls) == 2)
        writer.close()
        own = {"host", "accept", "accept-encoding", "user-agent"}  # of the router's client
        (*posted, headers, received), (*got, headers_of_get, _) = trainer.calls
        named = {"authorization": f"Bearer {SECRET}", "x-prelude-tenant": "acme", "x-prelude-credential": key}
        given = {"content-encoding": "zstd", "content-type": "application/x-protobuf", "content-length": str(3 * MIB)}
        assert (posted, got) == (["POST", "/api/v1/x"], ["GET", path])
        assert received == body
        assert {name: value for name, value in headers.items() if name not in own} == {**named, **given}
        assert {name: value for name, value in headers_of_get.items() if name not in own} == named


async def test_no_call_is_in_the_name_of_an_earlier_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with (
        serving() as trainer,
        keyed_cluster(tmp_path, 0, 0, trainer=TrainerAddress(trainer.url, SECRET)) as keyed,
    ):
        generation = keyed.catalog.tenants.remove("acme").generation
        key = await keyed.key("acme")
        assert (await keyed.ask(key, "POST", POLL))[0] == 200
        assert trainer.calls[-1][2]["x-prelude-tenant"] == f"acme#{generation}"
        never = property(lambda _: False, lambda *_: None)  # as of a token, before the catalog has been reached
        monkeypatch.setattr(Directory, "is_loaded", never, raising=False)
        for path, expected in ((POLL, 429), ("/api/v1/create_model", 503)):
            status, answer = await keyed.ask(key, "POST", path)
            assert (status, answer["error"]["code"]) == (expected, "trainer_unavailable")
        assert len(trainer.calls) == 1


async def test_a_router_without_keys_passes_none_on():
    async with routed() as (cluster, trainer):
        for headers, status in (({"x-api-key": "tml-whatever"}, 200), ({"origin": "http://evil.test"}, 403)):
            async with cluster.http.post(f"{cluster.url}{POLL}", json={}, headers=headers) as answer:
                assert answer.status == status
        [(_, _, headers, _)] = trainer.calls
        assert headers["x-prelude-tenant"] == "default"
        assert "x-prelude-credential" not in headers


async def test_who_may_train(tmp_path: Path):
    async with with_keys(tmp_path) as (keyed, trainer):
        key = await keyed.key("acme", {Scope.TRAIN})
        other = await keyed.key("acme", set(Scope) - {Scope.TRAIN, Scope.ADMIN})
        two = {"x-api-key": f"tml-{key}", "authorization": f"Bearer {other}"}
        for headers in ({}, {"x-api-key": "tml-prelude_unknown"}, two, {"x-api-key": f"tml-{other}"}):
            status, answer = await keyed.ask(None, "POST", "/api/v1/create_session", json={}, headers=headers)
            expected = (
                (403, "insufficient_scope") if other in headers.get("x-api-key", "") else (401, "invalid_api_key")
            )
            assert (status, answer["error"]["code"]) == expected, headers
        # That header is for trainers only.
        assert (await keyed.ask(None, "GET", "/v1/models", headers={"x-api-key": f"tml-{key}"}))[0] == 401
        assert trainer.calls == []
        assert (await keyed.ask(None, "GET", "/api/v1/healthz", headers={"x-api-key": key}))[0] == 200


async def test_changes_are_in_the_audit_log(tmp_path: Path):
    quotas = {"default": {"changes_per_min": 8}}
    async with with_keys(tmp_path, quotas=quotas) as (keyed, trainer):
        key = await keyed.key("acme", {Scope.TRAIN})
        trainer.headers = [JSON, (b"x-prelude-object", b"s:train:0")]

        async def newest() -> Sequence[tuple[Any, ...]]:
            events = keyed.catalog.audit.newest(100)
            return [(each.action, each.object, each.outcome) for each in events if each.tenant == "acme"]

        for path in ("create_session", "forward_backward", "optim_step", "retrieve_future"):
            assert (await keyed.ask(key, "POST", f"/api/v1/{path}"))[0] == 200
        assert await newest() == []  # steps are counted, not logged
        for path in ("create_model", "load_weights", "save_weights", "save_weights_for_sampler"):
            assert (await keyed.ask(key, "POST", f"/api/v1/{path}"))[0] == 200
            assert (await newest())[-1] == (f"training.{path}", "s:train:0", "done")  # before the answer
        trainer.may_answer.clear()
        leaving = asyncio.create_task(keyed.ask(key, "POST", "/api/v1/create_model"))
        await until(lambda: trainer.num_open)
        leaving.cancel()
        await eventually(newest, lambda found: found[-1] == ("training.create_model", None, "client_left"))
        trainer.may_answer.set()
        trainer.status = 404
        one = "/api/v1/training_runs/s:train:0/checkpoints/weights/a"
        for method, path, action in (("DELETE", one, "delete"), ("PUT", f"{one}/ttl", "expire")):
            assert (await keyed.ask(key, method, path))[0] == 404
            assert (await newest())[-1] == (f"training.{action}", "s:train:0", "refused_by_trainer")
        trainer.status = 401  # of the router itself
        status, answer = await keyed.ask(key, "POST", "/api/v1/create_model")
        assert (status, answer["error"]["message"]) == (503, "the trainer and this router need the same trainer.key")
        assert (await newest())[-1] == ("training.create_model", None, "trainer_unavailable")
        assert (await keyed.ask(key, "POST", "/api/v1/create_model"))[0] == 429  # the ninth
        assert (await newest())[-1] == ("training.create_model", None, "rate_limit_exceeded")


async def test_without_a_trainer():
    async with running_cluster(0, 0) as cluster:
        status, answer, _ = await cluster.post("/api/v1/create_session")
        assert (status, answer["error"]["code"]) == (404, "not_offered")
        assert "set trainer.url in cluster.yaml" in answer["error"]["message"]
    with bound_socket() as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with running_cluster(0, 0, trainer=TrainerAddress(url, SECRET)) as cluster:
        status, answer, headers = await cluster.post("/api/v1/create_session")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "trainer_unavailable", "1")
        assert "see that `prelude trainer` runs at trainer.url" in answer["error"]["message"]
        assert (await cluster.post(POLL))[0] == 429  # after a 5xx the SDK repeats it without a pause


async def test_a_trainer_that_dies_in_an_answer():
    async def half(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"12345", "more_body": True})

    async with routed() as (cluster, trainer):
        trainer.answer = half
        with pytest.raises(aiohttp.ClientPayloadError):
            await cluster.post(POLL)


async def test_bodies_over_the_limit_are_refused_early():
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(33):
            yield bytes(MIB // 32)

    async with routed(max_body_bytes=MIB) as (cluster, trainer):
        for num_begun, data in enumerate((bytes(MIB + 1), parts())):  # with a length, and without
            async with cluster.http.post(f"{cluster.url}/api/v1/x", data=data) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (413, "body_too_large")
            assert error["message"] == f"the body is larger than {MIB} bytes; send less data at a time"
            assert trainer.num_begun == num_begun
        assert trainer.calls == []  # the second was cut off before its end
        async with cluster.http.post(f"{cluster.url}/api/v1/x", data=bytes(MIB)) as answer:
            assert answer.status == 200
        await until(lambda: trainer.num_open == 0)


async def test_who_does_not_read_holds_the_other_back():
    """Both ways: the trainer sends back what it reads, so it reads on only when the client does."""

    async def echo(_scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        has_more = True
        while has_more:
            message = await receive()
            has_more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": has_more})

    async with routed(max_body_bytes=LONG) as (cluster, trainer):
        trainer.answer, reading = echo, None
        head = b"POST /api/v1/x HTTP/1.0\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % LONG
        reader, writer = await cluster.open(head)
        for _ in range(LONG // MIB):
            writer.write(bytes(MIB))
            try:
                await asyncio.wait_for(writer.drain(), 2)
            except TimeoutError:  # it is held back; on a slow machine this may come early, which passes
                reading = reading or asyncio.create_task(reader.read(-1))
                await writer.drain()
        assert reading is not None
        assert (await reading).partition(b"\r\n\r\n")[2].count(0) == LONG
        writer.close()


async def test_one_tenant_has_half_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("router.api.training._MAX_CALLS", 4)
    async with with_keys(tmp_path) as (keyed, trainer):
        trainer.may_answer.clear()
        acme, beta = await keyed.key("acme", {Scope.TRAIN}), await keyed.key("beta", {Scope.TRAIN})
        held = [asyncio.create_task(keyed.ask(acme, "POST", POLL)) for _ in range(2)]
        await until(lambda: trainer.num_open == 2)
        status, answer = await keyed.ask(acme, "POST", POLL)
        assert (status, answer["error"]["code"]) == (429, "too_many_training_calls")
        held.append(asyncio.create_task(keyed.ask(beta, "POST", POLL)))
        await until(lambda: trainer.num_open == 3)
        assert (await keyed.ask(None, "GET", "/health"))[0] == 200
        trainer.may_answer.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200] * 3


async def test_mutual_tls(tmp_path: Path):
    ca = authority(tmp_path / "ca")
    router = Transport(issued(ca, "router", "router"))
    for name, status in (("trainer", 200), ("decode", 503)):  # another process's certificate is not the trainer's
        async with serving(make_server_context(issued(ca, name, name))) as trainer:
            address = TrainerAddress(trainer.url, SECRET, router.engine_tls("trainer", "trainer"))
            async with running_cluster(0, 0, trainer=address) as cluster:
                assert (await cluster.post("/api/v1/x"))[0] == status
        assert len(trainer.calls) == (status == 200)
