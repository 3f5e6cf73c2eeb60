"""Quotas as clients see them, at a running router with stand-ins for engines."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import Behaviour, after, answers, drops, eventually, running_cluster, until
from support.routers.keyed_cluster import KeyedCluster, keyed_cluster
from support.routers.management_calls import ask, every_change, form, lora, push, upload

from adapters.scopes import Scope
from cluster.config.load import load_cluster_config
from cluster.errors import ConfigError
from router.identity.gate import SCOPE_OF
from router.quotas.bucket import Bucket


async def answer(cluster: KeyedCluster, key: str, path: str = "/v1/completions", **fields: Any) -> Any:
    body = {"model": "base", "prompt": "Hi", **fields}
    headers = {"authorization": f"Bearer {key}"}
    async with cluster.cluster.http.post(f"{cluster.cluster.url}{path}", json=body, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def test_a_tenant_over_its_limit_gets_429_and_the_others_do_not(tmp_path: Path) -> None:
    # So slow that the test's own time does not matter.
    quotas = {"default": {}, "tenants": {"acme": {"requests_per_s": 0.001}}}
    async with keyed_cluster(tmp_path, 0, 0, 1, quotas=quotas) as cluster:
        acme, other, beta = [await cluster.key(each) for each in ("acme", "acme", "beta")]
        status, _, headers = await answer(cluster, acme)
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, "0")
        for path, key in (("/v1/completions", acme), ("/v1/completions", other), ("/v1/tokenize", acme)):
            status, body, headers = await answer(cluster, key, path)
            assert status == 429
            assert (body["error"]["code"], body["error"]["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert "tenant acme has reached its limit of requests" in body["error"]["message"]
            assert 990 < int(headers["retry-after"]) <= 1000
            assert headers["x-ratelimit-limit-requests"] == "1"
            assert headers["x-ratelimit-reset-requests"].startswith("16m")
            assert headers["x-request-id"]
        status, _, headers = await answer(cluster, beta)
        assert status == 200
        assert not [name for name in headers if name.startswith("x-ratelimit")]
        page = await cluster.cluster.metrics_page()
        assert 'prelude_router_quota_refusals_total{limit="requests",tenant="acme"} 3.0' in page
        assert 'prelude_router_requests_total{endpoint="completions",status="429"} 2.0' in page


async def test_the_next_tenant_of_a_name_has_its_quota_to_itself(tmp_path: Path) -> None:
    quotas = {"default": {}, "tenants": {"acme": {"requests_per_s": 0.001, "changes_per_min": 1}}}
    async with keyed_cluster(tmp_path, 0, 0, 1, quotas=quotas) as cluster:

        async def spend(key: str) -> list[tuple[int, int]]:
            """Statuses of requests and of changes, two of each."""
            asked = [(await answer(cluster, key))[0] for _ in range(2)]
            changed = [(await cluster.ask(key, "DELETE", "/v1/adapters/acme/none"))[0] for _ in range(2)]
            return list(zip(asked, changed, strict=True))

        key = await cluster.key("acme", {Scope.INFER, Scope.ADAPTERS_WRITE})
        assert await spend(key) == [(200, 404), (429, 429)]
        cluster.catalog.tenants.remove("acme")
        following = await cluster.key("acme", {Scope.INFER, Scope.ADAPTERS_WRITE})
        assert await spend(following) == [(200, 404), (429, 429)]
        page = await cluster.cluster.metrics_page()
        ratios = [line for line in page.splitlines() if line.startswith("prelude_router_quota_used_ratio{")]
        assert [line.partition("}")[0][32:] for line in ratios] == ['limit="requests",tenant="acme"']


@pytest.mark.parametrize(
    ("behaviour", "status", "then"),
    [
        (answers(400), 400, 200),
        (drops, 502, 200),
        (after(3600), 504, 429),  # it may have generated for all that time
    ],
)
@pytest.mark.parametrize("shape", [(0, 0, 1), (1, 1, 0)])
async def test_a_request_that_failed_gives_its_output_back(
    shape: tuple[int, int, int], behaviour: Behaviour, status: int, then: int
) -> None:
    quotas = {"default": {"output_tokens_per_min": 1}}  # so slow that the test's own time does not matter
    async with running_cluster(*shape, quotas=quotas, answer_timeout_s=0.3 if status == 504 else 60.0) as cluster:
        (cluster.decode or cluster.unified)[0].engine.behaviours = [behaviour] * 3
        found, body, _ = await cluster.post(prompt="Hi", max_tokens=500)
        assert found == status, body
        (cluster.decode or cluster.unified)[0].engine.behaviours = []
        assert (await cluster.post(prompt="Hi"))[0] == then


@pytest.mark.parametrize(("stream", "then"), [(True, 200), (False, 429)])
async def test_a_client_that_leaves_before_the_first_event_has_used_no_output(stream: bool, then: int) -> None:
    """Of a whole answer nobody knows."""
    async with running_cluster(0, 0, 1, quotas={"default": {"output_tokens_per_min": 1}}) as cluster:
        (worker,) = cluster.unified
        worker.engine.behaviours = [after(3600)]
        asking = asyncio.create_task(cluster.post(prompt="Hi", max_tokens=500, stream=stream))
        await until(lambda: worker.engine.num_running)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await cluster.is_idle()
        assert (await cluster.post(prompt="Hi"))[0] == then


async def test_what_streams_and_clients_that_left_have_used_comes_back() -> None:
    quotas = {"default": {"sequences": 2, "output_tokens_per_min": 1000}}
    async with running_cluster(0, 0, 1, quotas=quotas) as cluster:
        (worker,) = cluster.unified
        worker.engine.behaviours = [after(60)]
        slow = asyncio.create_task(cluster.post(prompt="Hi", n=1))
        await until(lambda: worker.engine.num_running)
        status, body, headers = await cluster.post(prompt="Hi", n=2)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "sequences of 2 at a time" in body["error"]["message"]
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await eventually(lambda: cluster.post(prompt="Hi", n=2), lambda found: found[0] == 200)
        assert (await cluster.stream(prompt="Hi"))[-1] == b"[DONE]"


GOOD = "model: {path: /m, name: base}\nworkers: {u0: {role: unified}}\n"


@pytest.mark.parametrize(
    ("router", "line", "expected"),
    [
        ("quotas:\n    default: {requests_per_s: 0}", 5, "router.quotas.default.requests_per_s: .*greater than 0"),
        (
            "quotas:\n    default: {tokens: 5}",
            5,
            "router.quotas.default.tokens: there is no such field",
        ),
        ("auth: {}\n  quotas:\n    tenants: {a/b: {}}", 6, "router.quotas.tenants.*'a/b' is not a tenant's name"),
        ("quotas:\n    keys: {nobody: {}}", 5, "router.quotas.keys"),
        ("quotas: {tenants: {acme: {}}}", 4, "quotas.tenants.acme: without `auth` everybody is the tenant 'default'"),
    ],
)
def test_a_wrong_quota_is_an_error_at_the_start(tmp_path: Path, router: str, line: int, expected: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"{GOOD}router:\n  {router}\n")
    with pytest.raises(ConfigError, match=f"cluster.yaml:{line}: .*{expected}"):
        load_cluster_config(path)


async def test_tenants_take_turns_at_a_saturated_worker(tmp_path: Path) -> None:
    """One sequence at a time. Of one tenant's many requests and another's one, the latter is next."""
    quotas = {"fair_queue": {"timeout_s": 30, "max_requests": 3}}
    async with keyed_cluster(tmp_path, 0, 0, 1, quotas=quotas, max_running_requests=1) as cluster:
        (worker,) = cluster.cluster.unified
        acme, beta = [await cluster.key(each) for each in ("acme", "beta")]
        worker.engine.behaviours = [after(60)]
        first = asyncio.create_task(cluster.complete(acme))
        await until(lambda: worker.engine.num_running)
        many = [asyncio.create_task(cluster.complete(acme, prompt=f"acme {n}", max_tokens=1000)) for n in range(3)]

        num_queued = cluster.cluster.num_queued
        await eventually(num_queued, lambda count: count == 3)
        status, body = await cluster.complete(acme)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert "3 requests of tenant acme wait" in body["error"]["message"]
        one = asyncio.create_task(cluster.complete(beta, prompt="beta"))
        await eventually(num_queued, lambda count: count == 4)
        first.cancel()
        answers = await asyncio.gather(*many, one)
        assert [status for status, _ in answers] == [200] * 4
        prompts = [each["prompt"] for each in worker.engine.requests]
        assert prompts.index("beta") <= 4
        assert await num_queued() == 0


@pytest.mark.slow
async def test_two_routers_have_one_limit(tmp_path: Path) -> None:
    """A stand-in counts 7 tokens of each prompt."""
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    options: dict[str, Any] = {"catalog_url": url, "directories": {}, "shares_quotas": True}
    options["quotas"] = {"default": {"prompt_tokens_per_min": 2100}}
    async with (
        running_cluster(0, 0, 1, folder=tmp_path / "one", **options) as one,
        running_cluster(0, 0, 1, folder=tmp_path / "two", **options) as two,
    ):
        for router in (one, two):
            await eventually(router.metrics_page, lambda page: "prelude_router_quota_routers 2.0" in page)
        began_at = time.monotonic()
        counts: Counter[int] = Counter()
        while counts[429] < 10:
            for router in (one, two):
                status, _, _ = await router.post(prompt="Hi")
                counts[status] += 1
        most = (2100 + 35 * (time.monotonic() - began_at)) / 7
        # Not twice as many. Until a lease has told the one what the other has used, it may use half of that, too: a
        # quarter more in all, and the last request of each, which is little of this many.
        assert 0.6 * 2100 / 7 <= counts[200] <= 1.25 * most


async def test_adapters_of_a_tenant(tmp_path: Path) -> None:
    quotas = {"default": {"adapters": 1, "pushes_per_hour": 3}}
    async with running_cluster(0, 0, 1, management=True, directories={}, quotas=quotas) as cluster:
        one, other = lora(tmp_path, 0), lora(tmp_path, 1)
        assert (await upload(cluster, one, name="bot"))[0] == 201
        status, body = await upload(cluster, one, name="second")
        assert (status, body["error"]["code"]) == (403, "tenant_quota_reached")
        assert "tenant default may have 1 adapters" in body["error"]["message"]
        assert (await ask(cluster, "POST", "/v1/adapters/bot/push", data=form(other)))[0] == 200
        status, body = await upload(cluster, one, name="bot")
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "pushes of 3 an hour" in body["error"]["message"]


async def test_every_change_of_adapters_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has few pushes could else fill histories, the audit log and workers' queues with other changes."""
    changes = every_change(tmp_path)
    changing = {Scope.ADAPTERS_WRITE, Scope.WORKERS_OPERATE, Scope.ADMIN}
    assert len(changes) == sum(scope in changing for scope in SCOPE_OF.values())
    monkeypatch.setattr(Bucket, "refill", lambda *_: None)  # the test may take minutes
    quotas = {"default": {"changes_per_min": 1}}
    options: dict[str, Any] = {"management": True, "directories": {}, "quotas": quotas}
    async with running_cluster(0, 0, 1, **options) as cluster:
        assert (await upload(cluster, lora(tmp_path, 0), name="bot"))[0] == 201
        for method, path, sent in changes.values():
            status, body = await ask(cluster, method, path, **sent)
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded"), (path, body)
            assert "changes of 1 a minute" in body["error"]["message"]
        assert (await upload(cluster, lora(tmp_path, 0), name="acme/bot"))[0] == 201  # each tenant has its own


async def test_pins_of_a_tenant(tmp_path: Path) -> None:
    """What workers keep of a refused push is given up again."""
    quotas = {"default": {"pins": 1}}
    async with running_cluster(0, 0, 1, management=True, directories={}, quotas=quotas) as cluster:
        (worker,) = cluster.unified
        assert (await push(cluster, tmp_path, 1))[0] == (await push(cluster, tmp_path, 2))[0] == 200
        assert len(kept := set(worker.kept)) == 1
        refused = [
            await push(cluster, tmp_path, 3, name="second"),
            await ask(cluster, "PUT", "/v1/adapters/bot/aliases/prod", json={"revision": "r1"}),
        ]
        for status, body in refused:
            assert (status, body["error"]["code"]) == (403, "tenant_quota_reached")
            assert "tenant default may have 1 pins" in body["error"]["message"]
        assert worker.kept == kept
        assert (await ask(cluster, "POST", "/v1/adapters/bot/rollback"))[0] == 200
        assert (await ask(cluster, "DELETE", "/v1/adapters/bot"))[0] == 200
        assert (await push(cluster, tmp_path, 3, name="second"))[0] == 200
        assert (await ask(cluster, "POST", "/v1/adapters/bot/restore"))[0] == 403
