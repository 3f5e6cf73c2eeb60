"""Pages about models and requests in flight, the log line of a request, and a router that stops."""

import asyncio
import json

import openai
import pytest
from support.router_stand_ins import MODEL, REVISION_ID, ClusterStandIn, eventually, running_cluster, stops_after


class TestPages:
    async def test_models(self, cluster: ClusterStandIn) -> None:
        client = cluster.client
        models = {model.id: model.model_dump() async for model in client.models.list()}
        assert set(models) == {MODEL, "a0"}  # the broken adapter is not offered
        assert (models["a0"]["parent"], models["a0"]["root"]) == (MODEL, REVISION_ID)
        assert models[MODEL]["parent"] is None
        assert (await client.models.retrieve(MODEL)).id == MODEL
        assert (await client.models.retrieve("base:a0")).id == "base:a0"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("a9")

    async def test_debug_requests_shows_no_prompt(self, cluster: ClusterStandIn) -> None:
        cluster.prefill[0].ensure_delay_s = 0.5
        asking = asyncio.create_task(cluster.post(prompt="s3cret", adapter="a0"))
        (request,) = await cluster.has_phase("ensuring_adapter")
        assert (request["adapter"], request["revision"]) == ("a0", REVISION_ID)
        assert (request["sequences"][0]["prefill"], request["sequences"][0]["decode"]) == ("p0", "d0")
        assert "s3cret" not in json.dumps(request)
        await asking

    async def test_one_log_line_per_request(self, cluster: ClusterStandIn, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        headers = {"x-request-id": "mine-1", "authorization": "Bearer s3cret"}
        body = {"model": "a0", "prompt": "s3cret"}
        async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response:
            request_id = response.headers["x-request-id"]
            assert response.status == 200
        await cluster.is_idle()
        (line,) = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
        assert (line["request_id"], line["client_request_id"]) == (request_id, "mine-1")
        assert (line["adapter"], line["revision"], line["placements"]) == ("a0", REVISION_ID, ["p0>d0"])
        assert (line["status"], line["completion_tokens"]) == (200, 3)
        assert not any("s3cret" in str(record.__dict__) for record in caplog.records)


class TestStopping:
    async def test_running_streams_finish(self) -> None:
        async with running_cluster(drain_timeout_s=5) as cluster:
            cluster.decode[0].engine.event_gap_s = 0.1
            streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
            await cluster.has_phase("relaying")
            cluster.server.should_exit = True
            assert (await streaming)[-1] == b"[DONE]"
        assert "admin listener" not in {each.get_name() for each in asyncio.all_tasks()}

    async def test_streams_that_take_too_long_end_with_an_error(self) -> None:
        async with running_cluster(drain_timeout_s=0.3) as cluster:
            cluster.decode[0].engine.behaviours = [stops_after(2)]
            streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
            await cluster.has_phase("relaying")
            cluster.server.should_exit = True
            events = await asyncio.wait_for(streaming, 120)
            assert json.loads(events[-1])["error"]["code"] == "router_stopping"
            await eventually(lambda: asyncio.sleep(0, len(cluster.decode[0].engine.aborted)), bool)
