"""Spans of an agent, over its real gRPC service: what a load was made of, beneath the router's call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.adapters.held_adapters import StoredAdapters, until
from support.clusters.running_agent import RunningAgent, running_agent
from support.observability.otlp_receiver import ReceivedSpan, children_of, otlp_receiver, send_all, tracing_to

CALLER_ID = "b7ad6b7169203331"
STAGES = {"fetch", "room", "check", "engine"}


def call_of(trace: int, *, is_sampled: bool = True) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that is a step of trace number `trace`."""
    return (("traceparent", f"00-{trace:032x}-{CALLER_ID}-{is_sampled:02x}"),)


@asynccontextmanager
async def traced(
    stored: StoredAdapters, folder: Path
) -> AsyncIterator[tuple[RunningAgent, dict[int, list[ReceivedSpan]]]]:
    """An agent, and after the block the spans that came of it, by number of their trace."""
    found: dict[int, list[ReceivedSpan]] = {}
    with otlp_receiver() as receiver:
        tracing = tracing_to(receiver, "w")
        async with running_agent(stored, folder) as running:
            running.agent.tracing = tracing
            yield running, found
        send_all(tracing)
        for span in receiver.spans:
            found.setdefault(int(span.trace_id, 16), []).append(span)


async def test_a_cold_load_and_a_resident_adapter(stored: StoredAdapters, tmp_path: Path):
    revision = stored.ids[0]
    async with traced(stored, tmp_path) as (running, spans):
        await running.ensure(revision, metadata=call_of(1))
        await running.ensure(revision, metadata=call_of(2))
        await running.ensure(revision, metadata=call_of(3, is_sampled=False))
        await running.ensure(revision, metadata=(("traceparent", "nonsense"),))
        await running.ensure(revision)
    assert set(spans) == {1, 2}
    (ensure,) = [each for each in spans[1] if each.name == "EnsureAdapter"]
    assert (ensure.parent_id, ensure.instance) == (CALLER_ID, "w")
    assert ensure.attributes.items() >= {"prelude.worker": "w", "prelude.revision": revision}.items()
    assert ensure.attributes["prelude.load_s"] > 0
    assert {each.name for each in children_of(ensure, spans[1])} == {"load queue", "load adapter"}
    load = next(each for each in spans[1] if each.name == "load adapter")
    assert load.attributes == {"prelude.attempt": 1, "prelude.source": "store"}
    stages = children_of(load, spans[1])
    assert {each.name for each in stages} == STAGES
    slack_ns = 2_000_000  # a stage's begin is worked out from its duration, by another clock
    assert all(load.start_ns - slack_ns <= each.start_ns <= each.end_ns <= load.end_ns for each in stages)
    (resident,) = spans[2]
    assert (resident.name, resident.attributes["prelude.load_s"]) == ("EnsureAdapter", 0)


async def test_who_waits_for_the_load_of_another_request_is_linked_to_it(stored: StoredAdapters, tmp_path: Path):
    revision = stored.ids[0]
    async with traced(stored, tmp_path) as (running, spans):
        running.engine.may_answer.clear()
        calls = []
        for trace in (1, 2):
            calls.append(asyncio.create_task(running.ensure(revision, metadata=call_of(trace))))
            await until(lambda: running.agent._residency._queue.num_waiters == len(calls))  # type: ignore[union-attr]
        running.engine.may_answer.set()
        await asyncio.gather(*calls)
    (waiting,) = spans[2]
    (first,) = [each for each in spans[1] if each.name == "EnsureAdapter"]
    assert waiting.links == (first.span_id,)
    assert first.links == ()
