"""`adapter_scale` of a request: what engines are asked for, where it goes, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.router_stand_ins import MODEL, ClusterStandIn, eventually, running_cluster
from support.routers.management_calls import ask, id_of, lora, managing, push, upload

JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/embeddings": {"input": "Hi"},
}


def asked(cluster: ClusterStandIn) -> list[tuple[str | None, str | None]]:
    """What engines were asked for: adapter and namespace of the prefix cache; empty afterwards."""
    found = []
    for worker in cluster.workers:
        bodies = [msgspec.json.decode(body) for body in worker.engine.bodies]
        assert not any("adapter" in name for body in bodies for name in body)
        found += [(body.get("lora_path"), body.get("extra_key")) for body in bodies if worker.role != "decode"]
        assert not any("lora_path" in body for body in bodies if worker.role == "decode")
        worker.engine.bodies.clear()
    return found


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("num_prefill", "num_decode", "num_unified"), [(1, 1, 0), (0, 0, 1)])
async def test_engines_are_asked_for_the_revision_at_the_scale(
    path: str, num_prefill: int, num_decode: int, num_unified: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is the key of their prefix caches, too. Usage and headers name the revision alone."""
    caplog.set_level(logging.INFO)
    async with running_cluster(num_prefill, num_decode, num_unified) as cluster:
        reader = next(worker for worker in cluster.workers if worker.role != "decode")
        fingerprints, logged = {}, []
        for scale, suffix in ((None, ""), (1, ""), (1.0, ""), (0.5, "x0.5"), (0.1 + 0.05, "x0.15"), (2, "x2")):
            fields = {} if scale is None else {"adapter_scale": scale}
            status, answer, headers = await cluster.post(path, **BODIES[path], adapter="a0", **fields)
            assert status == 200, answer
            revision = headers["x-prelude-revision"]
            assert revision.startswith("sha256:")
            [(found, namespace)] = asked(cluster)
            assert (found, namespace) == (f"{revision}{suffix}", "default|")
            assert reader.ensured[-1] == found
            fingerprints[suffix] = answer.get("system_fingerprint")
            logged.append(scale if scale is None else round(scale, 2))
        if "embeddings" not in path and "responses" not in path:
            assert len(set(fingerprints.values())) == 4
            assert fingerprints["x0.5"] == f"{fingerprints['']}x0.5"
        await cluster.is_idle()
        lines = [each.__dict__["fields"] for each in caplog.records if each.message == "request"]
        assert [line.get("adapter_scale") for line in lines] == logged
        assert {line["revision"] for line in lines} == {revision}


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_no_scale_is_refused(path: str, cluster: ClusterStandIn) -> None:
    wrong = {
        '"0.5"': "must be a number",
        "true": "must be a number",
        "[1]": "must be a number",
        "NaN": "",
        "1e999": "must be a number",
        "0": "must be from 0.05 to 2",
        "-0.5": "must be from 0.05 to 2",
        "1e-300": "must be from 0.05 to 2",
        "2.05": "must be from 0.05 to 2",
        "1e308": "must be from 0.05 to 2",
        "0.33": "must be a multiple of 0.05 (found 0.33); 0.35 is the nearest",
        "1.00001": "must be a multiple of 0.05",
    }
    for text, said in wrong.items():
        body = msgspec.json.encode({"model": MODEL, "adapter": "a0", **BODIES[path], "adapter_scale": 7})
        body = body.replace(b'"adapter_scale":7', b'"adapter_scale":' + text.encode())
        async with cluster.http.post(f"{cluster.url}{path}", data=body, headers=JSON) as response:
            answer = (await response.json())["error"]
            assert (response.status, answer["param"]) == (400, "adapter_scale" if said else None), answer
            assert said in answer["message"]
    for scale in (0.5, 1):
        status, answer, _ = await cluster.post(path, **BODIES[path], adapter_scale=scale)
        assert (status, answer["error"]["param"]) == (400, "adapter_scale")
        assert "needs an adapter" in answer["error"]["message"]
    assert asked(cluster) == []
    status, answer, _ = await cluster.post(path, **BODIES[path], adapter="a0", adapter_scale=None)  # as if absent
    assert status == 200, answer


async def test_what_is_in_memory_only_has_no_other_scale(tmp_path: Path) -> None:
    async with managing(1, 1, directories={}) as cluster:
        status, answer = await push(cluster, tmp_path, 1, "acme/bot")
        assert status == 200, answer
        status, answer, _ = await cluster.post(prompt="Hi", adapter="acme/bot", adapter_scale=0.5)
        assert (status, answer["error"]["param"]) == (400, "adapter_scale")
        assert "must be 1 for acme/bot@r1 (found 0.5)" in answer["error"]["message"]
        assert (await cluster.post(prompt="Hi", adapter="acme/bot", adapter_scale=1))[0] == 200


async def test_a_split_alias_has_scales(tmp_path: Path) -> None:
    async with managing(1, 1, directories={}) as cluster:
        for seed in (1, 2):
            await upload(cluster, lora(tmp_path, seed), name="acme/bot")
        prod = "/v1/adapters/acme/bot/aliases/prod"
        assert (await ask(cluster, "PUT", prod, json={"weights": {"r1": 50, "r2": 50}}))[0] == 200
        for user in map(str, range(24)):
            assert (await cluster.post(prompt="Hi", adapter="acme/bot@prod", user=user, adapter_scale=1.5))[0] == 200
        assert {name for name, _ in asked(cluster)} == {f"{id_of(tmp_path, seed)}x1.5" for seed in (1, 2)}


async def test_a_request_goes_where_its_scale_is() -> None:
    """And not where the revision is at another one."""
    async with running_cluster(2, 1) as cluster:
        _, _, headers = await cluster.post(prompt="Hi", adapter="a0")
        revision = headers["x-prelude-revision"]
        one = next(worker for worker in cluster.prefill if worker.ensured)
        other = next(worker for worker in cluster.prefill if worker is not one)
        await other.make_resident(f"{revision}x0.5")
        await eventually(lambda: _holders(cluster, f"{revision}x0.5"), lambda names: names == (other.name,))
        for scale, worker in ((0.5, other), (1, one), (0.5, other)):
            await cluster.post(prompt="Hi", adapter="a0", adapter_scale=scale)
            assert worker.ensured[-1] == (revision if scale == 1 else f"{revision}x0.5")
        assert (len(one.ensured), len(other.ensured)) == (2, 2)


async def _holders(cluster: ClusterStandIn, name: str) -> tuple[str, ...]:
    return cluster.fleet.workers_with(name)
