"""Traces of the router before stand-ins of workers, as a collector gets them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.observability.otlp_receiver import (
    OtlpReceiver,
    ReceivedSpan,
    children_of,
    named,
    otlp_receiver,
    send_all,
    tracing_to,
)
from support.router_stand_ins import (
    MODEL,
    REVISION_ID,
    ClusterStandIn,
    answers,
    drops,
    eventually,
    hangs,
    post_bytes,
    running_cluster,
    until,
)
from support.router_stand_ins.engine import NUM_PROMPT_TOKENS

from adapters.errors import AdapterIncompatible
from process.tracing import recorded
from process.tracing.span import Tracing
from router.collectors import OPERATIONS
from router.protocol.validation import Endpoint

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
SECRET = "the prompt is nobody's business"
SERVER, CLIENT = 2, 3  # kinds of spans in OTLP
MALFORMED = (
    "",
    "x" * 5_000,
    f"00-{TRACE_ID.upper()}-{CALLER_ID}-01",
    f"00-{'0' * 32}-{CALLER_ID}-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"ff-{TRACE_ID}-{CALLER_ID}-01",
    f"00-{TRACE_ID}-{CALLER_ID}-01-{SECRET}",
    f"00-{TRACE_ID}-{CALLER_ID}",
    f"00-{TRACE_ID}-{CALLER_ID}-0\xe9",
)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@asynccontextmanager
async def traced(
    receiver: OtlpReceiver, *shape: int, tracing: Tracing | None = None, end: Callable[[Tracing], None] = send_all
) -> AsyncIterator[tuple[ClusterStandIn, list[ReceivedSpan]]]:
    """A cluster, and after the block all spans that came of it."""
    tracing, spans = tracing or tracing_to(receiver), []
    async with running_cluster(*shape, tracing=tracing) as cluster:
        yield cluster, spans
    end(tracing)
    spans += sorted(receiver.spans, key=lambda each: each.start_ns)


async def ask(cluster: ClusterStandIn, headers: dict[str, str], **fields: Any) -> tuple[int, Any]:
    body = {"model": MODEL, "prompt": SECRET, **fields}
    async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status, response.headers


class TestOneTrace:
    @pytest.mark.slow
    @pytest.mark.parametrize("stream", [False, True])
    async def test_of_a_pair(self, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
        """From the client's span to those of engines and agents, with what was decided and when."""
        seen: dict[str, dict[str, str]] = {}

        caplog.set_level(logging.INFO)
        async with traced(receiver) as (cluster, spans):
            status, headers = await ask(cluster, {**SAMPLED, "tracestate": "vendor=1"}, adapter="a0", stream=stream)
            assert (status, headers["x-prelude-trace-id"]) == (200, TRACE_ID)
            (prefill,), (decode,) = cluster.prefill, cluster.decode
            seen["prefill"], seen["decode"] = prefill.engine.headers[0], decode.engine.headers[0]
            seen["ensure adapter"] = prefill.metadata[0]
        assert {each.trace_id for each in spans} == {TRACE_ID}
        root = named("POST /v1/completions", spans)
        assert (root.parent_id, root.kind, root.error) == (CALLER_ID, SERVER, None)
        assert [each.name for each in children_of(root, spans)] == ["admission", "resolve", "placement", "attempt"]
        told = {"adapter": "a0", "revision": REVISION_ID, "attempts": 1}
        assert root.attributes.items() >= {f"prelude.{name}": value for name, value in told.items()}.items()
        assert root.attributes["http.response.status_code"] == 200
        placement, attempt = named("placement", spans), named("attempt", spans)
        assert placement.attributes.items() >= {"prelude.prefill": "p0", "prelude.decode": "d0"}.items()
        calls = children_of(attempt, spans)
        assert {each.name for each in calls} == {"ensure adapter", "prefill", "decode"}
        assert calls[0].name == "ensure adapter"
        for call in calls:
            assert call.kind == CLIENT
            assert call.start_ns >= attempt.start_ns
            assert call.end_ns <= attempt.end_ns <= root.end_ns
            assert seen[call.name]["traceparent"] == f"00-{TRACE_ID}-{call.span_id}-01"
            assert seen[call.name]["tracestate"] == "vendor=1"
        assert named("decode", spans).events == ("first token" if stream else "answer",)
        assert named("ensure adapter", spans).attributes["prelude.load_s"] == 0.25
        assert SECRET not in repr(spans)
        (line,) = [each.fields for each in caplog.records if getattr(each, "fields", {}).get("endpoint")]
        assert line["trace_id"] == TRACE_ID

    async def test_of_several_sequences_at_a_unified_worker_without_an_adapter(self, receiver: OtlpReceiver) -> None:
        async with traced(receiver, 0, 0, 1) as (cluster, spans):
            assert (await ask(cluster, {}, n=2))[0] == 200
        root = named("POST /v1/completions", spans)
        assert (root.parent_id, root.attributes["prelude.sequences"]) == ("", 2)
        attempts = [each for each in spans if each.name == "attempt"]
        assert sorted(each.attributes["prelude.sequence"] for each in attempts) == [0, 1]
        (call,) = children_of(attempts[0], spans)
        assert (call.name, call.attributes["prelude.worker"]) == ("unified", "u0")


class TestGenAiConventions:
    @pytest.mark.slow
    @pytest.mark.parametrize("stream", [False, True])
    async def test_what_was_asked_and_what_was_given(self, receiver: OtlpReceiver, stream: bool) -> None:
        doubles = {"temperature": 0.5, "top_p": 1, "frequency_penalty": 0.25, "presence_penalty": -1}
        asked = {**doubles, "top_k": 4, "seed": 5}
        async with traced(receiver) as (cluster, spans):
            cluster.prefill[0].engine.num_cached_tokens = 2
            fields = {**asked, "max_tokens": 7, "n": 2, "stop": SECRET}
            assert (await ask(cluster, {}, adapter="a0", stream=stream, **fields))[0] == 200
        root = named("POST /v1/completions", spans)
        found = {name[7:]: value for name, value in root.attributes.items() if name.startswith("gen_ai.")}
        assert (found.pop("response.time_to_first_chunk", None) is not None) == stream
        assert found == {f"request.{name}": value for name, value in asked.items()} | {
            "operation.name": "text_completion",
            "provider.name": "prelude",
            "request.model": "a0",
            "request.max_tokens": 7,
            "request.choice.count": 2,
            "request.stream": stream,
            "response.model": MODEL,
            "response.finish_reasons": ["stop", "stop"],
            "usage.input_tokens": NUM_PROMPT_TOKENS,
            "usage.output_tokens": 2 * len(cluster.decode[0].engine.words),
            "usage.cache_read.input_tokens": 2,
        }
        assert {type(found[f"request.{name}"]) for name in doubles} == {float}
        assert (root.attributes["server.address"], root.attributes["server.port"]) == ("127.0.0.1", 0)  # as configured

    @pytest.mark.slow
    async def test_operations(self, receiver: OtlpReceiver) -> None:
        assert OPERATIONS.keys() == {endpoint.label for endpoint in Endpoint}
        async with traced(receiver) as (cluster, spans):
            await cluster.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
            await cluster.stream("/v1/responses", input="Hi", max_output_tokens=9)
            await cluster.post("/v1/embeddings", input="Hi")
        roots = [each.attributes for each in spans if not each.parent_id]
        assert [root["gen_ai.operation.name"] for root in roots] == ["chat", "chat", "embeddings"]
        assert [root.get("gen_ai.request.max_tokens") for root in roots] == [None, 9, None]
        assert [root.get("gen_ai.response.finish_reasons") for root in roots] == [["stop"], ["stop"], None]
        assert [root["gen_ai.usage.input_tokens"] for root in roots] == [NUM_PROMPT_TOKENS] * 3


class TestFailures:
    @pytest.mark.slow
    async def test_retries_are_attempts_of_the_same_trace(self, receiver: OtlpReceiver) -> None:
        async with traced(receiver, 2, 1) as (cluster, spans):
            cluster.prefill_by_affinity[0].engine.behaviours = [drops]
            cluster.decode[0].engine.behaviours = [hangs]
            assert (await ask(cluster, SAMPLED, adapter="a0", stream=True))[0] == 200
        first, second = (each for each in spans if each.name == "attempt")
        assert (first.error, second.error) == ("worker_lost", None)
        assert [each.attributes["prelude.attempt"] for each in (first, second)] == [1, 2]
        one, other = (each.attributes["prelude.prefill"] for each in spans if each.name == "placement")
        assert one != other
        assert {each.name for each in children_of(second, spans)} == {"ensure adapter", "prefill", "decode"}
        lost = next(each for each in children_of(first, spans) if each.name == "prefill")
        assert (lost.error, lost.attributes["prelude.aborted"]) == ("worker_lost", True)
        root = named("POST /v1/completions", spans)
        assert (root.error, root.attributes["prelude.attempts"]) == (None, 2)

    @pytest.mark.slow
    async def test_where_a_request_failed(self, receiver: OtlpReceiver) -> None:
        """A client's mistake is no error of the server, but of the step that found it."""

        async with traced(receiver) as (cluster, spans):
            assert (await ask(cluster, SAMPLED, temperature="hot"))[0] == 400
            assert (await ask(cluster, SAMPLED, adapter="nobody"))[0] == 404
            cluster.prefill[0].ensure_errors = [AdapterIncompatible("no")]
            assert (await ask(cluster, SAMPLED, adapter="a0"))[0] == 422
            cluster.decode[0].engine.behaviours = [answers(500)] * 3
            assert (await ask(cluster, SAMPLED))[0] == 502
        roots = [each for each in spans if each.parent_id == CALLER_ID]
        assert [each.attributes["http.response.status_code"] for each in roots] == [400, 404, 422, 502]
        assert [each.error for each in roots] == [None, None, None, "502"]
        assert [root.attributes.get("gen_ai.request.model") for root in roots] == [None, None, "a0", MODEL]
        failed = [[each.name for each in children_of(root, spans) if each.error is not None] for root in roots[:2]]
        assert failed == [["admission"], ["resolve"]]
        assert named("ensure adapter", spans).error == "adapter_incompatible"
        assert "hot" not in repr(spans)

    @pytest.mark.slow
    async def test_a_client_that_leaves(self, receiver: OtlpReceiver) -> None:
        async with traced(receiver) as (cluster, spans):
            cluster.decode[0].engine.behaviours = [hangs]
            leaving = asyncio.create_task(ask(cluster, SAMPLED, stream=True))
            await until(lambda: cluster.decode[0].engine.num_running)
            leaving.cancel()
            await cluster.is_idle()
        assert named("POST /v1/completions", spans).attributes["http.response.status_code"] == 499
        assert named("decode", spans).attributes["prelude.aborted"] is True
        assert named("attempt", spans).error is None


class TestSampling:
    @pytest.mark.slow
    async def test_a_malformed_traceparent_is_ignored(
        self, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids: list[str] = []
        async with traced(receiver) as (cluster, spans):
            for value in MALFORMED:
                headers = ("connection: close", f"traceparent: {value}", f"tracestate: \xe9={SECRET}")
                reader, writer = await cluster.open(post_bytes("/v1/completions", *headers, prompt="Hi"))
                answer = (await reader.read()).decode()
                writer.close()
                assert answer.startswith("HTTP/1.1 200"), value[:100]
                ids.append(answer.partition("x-prelude-trace-id: ")[2][:32])
        assert len(set(ids)) == len(MALFORMED)
        assert TRACE_ID not in ids
        roots = [each for each in spans if each.name == "POST /v1/completions"]
        assert {each.trace_id for each in roots} == set(ids)
        assert {each.parent_id for each in roots} == {""}
        assert SECRET not in caplog.text

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("changes", "headers"),
        [({}, {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-00"}), ({"sample_ratio": 0.0}, {}), (None, SAMPLED)],
    )
    async def test_what_is_not_sampled_is_recorded_nowhere(
        self, receiver: OtlpReceiver, changes: dict[str, Any] | None, headers: dict[str, str]
    ) -> None:
        """Whoever does not trace at all has no id either."""
        tracing = Tracing() if changes is None else tracing_to(receiver, **changes)
        async with traced(receiver, tracing=tracing) as (cluster, spans):
            status, answered = await ask(cluster, headers, adapter="a0")
            assert status == 200
            assert len(answered.get("x-prelude-trace-id", "")) == (0 if changes is None else 32)
            assert "traceparent" not in cluster.prefill[0].metadata[0]
            for worker in cluster.workers:
                assert "traceparent" not in worker.engine.headers[0]
        assert spans == []

    @pytest.mark.slow
    async def test_clients_may_be_kept_from_choosing(self, receiver: OtlpReceiver) -> None:
        async with traced(receiver, tracing=tracing_to(receiver, continues_client_traces=False)) as (cluster, spans):
            assert (await ask(cluster, SAMPLED))[1]["x-prelude-trace-id"] != TRACE_ID
        assert named("POST /v1/completions", spans).parent_id == ""


@pytest.mark.slow
async def test_a_collector_that_hangs(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds one batch; the queue holds twenty spans, and the other hundreds are dropped."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    monkeypatch.setattr(recorded, "_STOP_S", 0.2)
    receiver.may_answer.clear()
    async with traced(receiver, tracing=tracing_to(receiver), end=lambda each: each.stop()) as (cluster, _spans):
        async with asyncio.timeout(120):
            found = await asyncio.gather(*(ask(cluster, {}, adapter="a0", stream=True) for _ in range(40)))
        assert {status for status, _ in found} == {200}
        await eventually(lambda: asyncio.sleep(0, receiver.num_exports), bool, within_s=120)
        assert receiver.num_exports == 1
    receiver.may_answer.set()  # the export has been held until now
    receiver.wait(lambda spans: len(spans) >= 10)
    assert len(receiver.spans) <= 30
