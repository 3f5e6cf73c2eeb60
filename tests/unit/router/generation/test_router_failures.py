"""What a client gets when an engine or a worker fails, before and after the first event."""

import asyncio
import json
import logging
from typing import Any

import pytest
from support.router_stand_ins import (
    REVISION_ID,
    ClusterStandIn,
    after,
    answers,
    breaks_after,
    drops,
    event_gap_timeout_s,
    eventually,
    hangs,
    running_cluster,
    stops_after,
    streams,
    until,
)

EVENT = b'data: {"id":"x","object":"text_completion","created":1,"model":"base","choices":[]}\n\n'


class TestFailuresBeforeTheFirstEvent:
    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize("failure", [drops, answers(500)])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_another_pair_answers(self, role: str, failure: Any, stream: bool) -> None:
        async with running_cluster(2, 2) as cluster:
            failing = (cluster.prefill if role == "prefill" else cluster.decode)[0]
            other = (cluster.decode if role == "prefill" else cluster.prefill)[0]
            failing.engine.behaviours = [failure]
            other.engine.behaviours = [hangs]  # its counterpart never arrives
            if stream:
                assert (await cluster.stream(prompt="Hi"))[-1] == b"[DONE]"
            else:
                assert (await cluster.post(prompt="Hi"))[0] == 200
            assert len(failing.engine.bodies) == 1
            # the surviving call of the failed attempt is aborted
            rid = other.engine.requests[0]["rid"]
            await eventually(lambda: asyncio.sleep(0, list(other.engine.aborted)), lambda aborted: rid in aborted, 2)
            retried = [request["rid"] for worker in cluster.workers for request in worker.engine.requests]
            assert not any(r != rid and r.startswith(rid) for r in retried)

    async def test_who_took_part_in_two_failures_is_avoided_whoever_has_reported_them(self) -> None:
        """A prefill worker that sends no KV: each decode worker says that the transfer failed."""
        async with running_cluster(2, 3) as cluster:
            first, other = cluster.prefill_by_affinity
            for decode in cluster.decode[:2]:
                decode.engine.behaviours = [answers(500)]
            assert (await cluster.post(prompt="Hi", adapter="a0"))[0] == 200
            assert (len(first.engine.bodies), len(other.engine.bodies)) == (2, 1)

    async def test_dead_worker_without_another(self, cluster: ClusterStandIn) -> None:
        cluster.decode[0].engine.behaviours = [drops]
        cluster.prefill[0].engine.behaviours = [hangs]
        status, answer, headers = await cluster.post(prompt="Hi", adapter="a0")
        assert (status, answer["error"]["code"]) == (502, "worker_lost")
        assert answer["error"]["type"] == "server_error"
        assert headers["retry-after"] == "1"
        assert headers["x-prelude-revision"] == REVISION_ID
        assert (await cluster.post(prompt="Hi"))[0] == 200  # and the next request is served

    async def test_agent_reports_a_dead_engine_before_tcp_does(self, cluster: ClusterStandIn) -> None:
        cluster.prefill[0].engine.behaviours = [hangs]
        cluster.decode[0].engine.behaviours = [after(60)]
        asking = asyncio.create_task(cluster.post(prompt="Hi"))
        await until(lambda: cluster.decode[0].engine.num_running)
        await cluster.decode[0].change(incarnation="d0-2")
        status, answer, _ = await asyncio.wait_for(asking, 120)
        assert (status, answer["error"]["code"]) == (502, "worker_lost")

    async def test_an_agent_that_falls_silent_is_not_waited_for(self) -> None:
        async with running_cluster(0, 0, 2, heartbeat_s=0.2) as cluster:
            first, second = cluster.unified
            first.engine.behaviours = [hangs]
            asking = asyncio.create_task(cluster.post(prompt="Hi"))
            await until(lambda: first.engine.num_running)
            first.sends_states.clear()
            assert (await asyncio.wait_for(asking, 120))[0] == 200
            assert len(second.engine.bodies) == 1

    async def test_wrong_request_is_not_retried(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "router.generation.sequence_run")
        message = "The input (9 tokens) is longer than the model's context length (8 tokens)."
        error = {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}
        async with running_cluster(2, 2) as cluster:
            cluster.prefill[0].engine.behaviours = [answers(400, error)]
            cluster.decode[0].engine.behaviours = [hangs]
            status, answer, _ = await cluster.post(prompt="Hi", stream=True)
            assert status == 400
            assert answer["error"]["message"] == message
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["code"] == "context_length_exceeded"
            assert cluster.num_bodies == [1, 0, 1, 0]
        (line,) = [record.fields for record in caplog.records if record.message == "attempt failed"]  # type: ignore[attr-defined]
        assert (line["code"], line["retry"]) == ("context_length_exceeded", False)
        assert message not in str(line)  # others quote what the client has sent

    async def test_aborts_inside_a_200_count_as_failures(self) -> None:
        error = (
            b'data: {"error": {"object": "error", "message": "KV transfer", "type": "x", "param": null, "code": 500}}'
        )
        async with running_cluster(1, 2) as cluster:
            cluster.decode[0].engine.behaviours = [streams(error + b"\n\n", b"data: [DONE]\n\n")]
            assert (await cluster.stream(prompt="Hi"))[-1] == b"[DONE]"
            assert len(cluster.decode[1].engine.bodies) == 1

            async def gives_up(engine: Any, fields: Any, request: Any) -> Any:
                return await answers(200, engine.answer(fields, finish_reason="abort"))(engine, fields, request)

            cluster.prefill[0].engine.behaviours = [gives_up]
            cluster.decode[0].engine.behaviours = [hangs]
            assert (await cluster.post(prompt="Hi"))[0] == 200

    @pytest.mark.parametrize("shape", [(1, 1, 0), (0, 0, 1)], ids=["pair", "unified"])
    @pytest.mark.parametrize(("stream", "waited_for"), [(True, "the first token"), (False, "the answer")])
    async def test_nothing_in_time(self, shape: tuple[int, int, int], stream: bool, waited_for: str) -> None:
        limits = {"first_event_timeout_s": 0.3, "answer_timeout_s": 60.0 if stream else 0.5}
        async with running_cluster(*shape, **limits) as cluster:
            hanging = cluster.workers if stream else cluster.workers[-1:]
            for worker in hanging:
                worker.engine.behaviours = [hangs]
            status, answer, _ = await cluster.post(prompt="Hi", stream=stream)
            said = answer["error"]["code"], answer["error"]["message"]
            assert (status, *said) == (504, "deadline_exceeded", f"{waited_for} did not come in time")
            for worker in hanging:
                rid = worker.engine.requests[0]["rid"]
                await eventually(lambda w=worker: asyncio.sleep(0, w.engine.aborted), lambda a, r=rid: r in a)

    @pytest.mark.parametrize("shape", [(1, 1, 0), (0, 0, 1)], ids=["pair", "unified"])
    async def test_only_the_whole_answer_has_a_deadline_where_there_is_no_stream(self, shape: tuple[int, ...]) -> None:
        async with running_cluster(*shape, first_event_timeout_s=0.1, answer_timeout_s=60.0) as cluster:
            cluster.workers[-1].engine.behaviours = [after(0.25)]
            assert (await cluster.post(prompt="Hi"))[0] == 200

    async def test_restarted_decode_needs_warming(self, cluster: ClusterStandIn) -> None:
        await cluster.decode[0].change(incarnation="d0-2")
        await cluster.is_ready(False)
        status, answer, headers = await cluster.post(prompt="Hi")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_worker_available", "1")
        await cluster.warm()
        await cluster.is_ready()


class TestFailuresAfterTheFirstEvent:
    @pytest.mark.parametrize(
        ("failure", "code"),
        [
            (breaks_after(2), "worker_lost"),
            (stops_after(2), "deadline_exceeded"),
            (streams(EVENT), "broken_answer"),
            (streams(EVENT, b'data: {"error": {"code": 500}}\n\n'), "engine_failure"),
        ],
    )
    async def test_stream_ends_with_an_error_event(self, failure: Any, code: str) -> None:
        async with running_cluster(event_gap_timeout_s=event_gap_timeout_s(code)) as cluster:
            cluster.decode[0].engine.behaviours = [failure]
            events = await cluster.stream(prompt="Hi")
            assert len(events) >= 2
            error = json.loads(events[-1])["error"]
            assert (error["code"], error["type"]) == (code, "server_error")

    async def test_engine_death_reported_by_the_agent(self, cluster: ClusterStandIn) -> None:
        decode = cluster.decode[0]
        decode.engine.behaviours = [stops_after(1)]
        streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
        await cluster.has_phase("relaying")
        await decode.change(engine_state=3, ready=False, incarnation="")
        events = await asyncio.wait_for(streaming, 120)
        assert json.loads(events[-1])["error"]["code"] == "worker_lost"

    async def test_prefill_may_die_once_decode_speaks(self, cluster: ClusterStandIn) -> None:
        cluster.prefill[0].engine.behaviours = [after(3600)]
        cluster.decode[0].engine.event_gap_s = 0.1
        streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
        await cluster.has_phase("relaying")
        await cluster.prefill[0].crash_engine()
        assert (await streaming)[-1] == b"[DONE]"

    @pytest.mark.slow
    async def test_silent_agent_does_not_stop_a_stream_and_gets_no_other(self) -> None:
        async with running_cluster(heartbeat_s=0.05) as cluster:
            cluster.decode[0].engine.event_gap_s = 0.2
            streaming = asyncio.create_task(cluster.stream(prompt="Hi"))
            await cluster.has_phase("relaying")
            cluster.decode[0].sends_states.clear()
            assert (await streaming)[-1] == b"[DONE]"
            assert (await cluster.get("/ready"))[0] == 503
            cluster.decode[0].sends_states.set()
            await cluster.is_ready()
