"""What the router measures of requests: phases, gaps between events, goodput; and in which state workers are."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.router_stand_ins import MODEL, ClusterStandIn, breaks_after, drops, eventually, hangs, running_cluster
from support.router_stand_ins.engine import WORDS
from support.routers.fleets import PREFILLS
from support.routers.virtual_time import Clock

from cluster.config.router import SloConfig
from router import collectors
from router.api.request_record import keeps_slo
from router.collectors import OTHER, BusiestAdapters
from router.metrics import WORKER_STATES, Metrics

Samples = dict[str, dict[tuple[str, ...], float]]


async def samples_of(cluster: ClusterStandIn) -> Samples:
    """The metrics page, when no request is in flight: values by name and by the values of their labels."""
    await cluster.is_idle()
    page = await cluster.metrics_page()
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


@pytest.mark.slow
async def test_each_phase_of_a_sequence_is_timed(cluster: ClusterStandIn) -> None:
    await cluster.stream(prompt="Hi", adapter="a0")
    await cluster.post(prompt="Hi", n=2)
    found = await samples_of(cluster)
    phases = ("admitted", "ensuring_adapter", "waiting_first_event", "relaying")
    expected = {(is_loaded, phase): number for is_loaded, number in (("true", 1), ("false", 2)) for phase in phases}
    assert found["prelude_router_phase_seconds_count"] == {**expected, ("false", "ensuring_adapter"): 0}
    cluster.decode[0].engine.behaviours = [drops]
    await cluster.post(prompt="Hi")  # a failed attempt counts, too
    found = await samples_of(cluster)
    assert found["prelude_router_phase_seconds_count"]["false", "waiting_first_event"] == 3


async def test_requests_by_whether_they_keep_the_slo() -> None:
    found = []
    for slo in (SloConfig(first_token_s=600, event_gap_s=600), SloConfig(first_token_s=1e-9, event_gap_s=1e-9)):
        async with running_cluster(slo=slo) as cluster:
            await cluster.post(prompt="Hi")
            await cluster.stream(prompt="Hi")
            await cluster.post(prompt="Hi", adapter="nobody")  # refused: neither
            cluster.decode[0].engine.behaviours = [breaks_after(1)]
            await cluster.stream(prompt="Hi")  # ends with an error: neither
            cluster.decode[0].engine.behaviours = [hangs]
            leaving = asyncio.create_task(cluster.post(prompt="Hi"))
            await cluster.has_phase("waiting_first_event")
            leaving.cancel()  # neither
            found.append(await samples_of(cluster))
    fast, slow = found[0], found[1]
    assert fast["prelude_router_slo_requests_total"] == {("completions", "true"): 2}
    assert slow["prelude_router_slo_requests_total"] == {("completions", "false"): 2}
    per_token = fast["gen_ai_server_time_per_output_token_seconds_count"]
    assert per_token == {("text_completion", "prelude", MODEL): 1}


@pytest.mark.parametrize(
    ("num_later", "first_s", "duration_s", "kept"),
    [
        (10, 1.9, 2.8, True),
        (10, 2.1, 2.2, False),  # the first event is late
        (10, 1.0, 2.5, False),  # the others are slow
        (0, 1.0, 1.05, True),  # a single event, and the end of the stream
        (10, None, 2.9, True),  # in one piece
        (10, None, 3.1, False),
        (-1, None, 1.9, True),  # without any token
    ],
)
def test_what_keeps_the_slo(num_later: int, first_s: float | None, duration_s: float, kept: bool) -> None:
    assert keeps_slo(SloConfig(first_token_s=2, event_gap_s=0.1), num_later, first_s, duration_s) is kept


@pytest.mark.parametrize(("num_hidden_tokens", "met"), [(0, "false"), (500, "true")])
async def test_events_of_several_tokens_may_be_as_far_apart(num_hidden_tokens: int, met: str) -> None:
    async with running_cluster(slo=SloConfig(event_gap_s=0.05)) as cluster:
        engine = cluster.decode[0].engine
        engine.event_gap_s, engine.num_hidden_tokens = 0.2, num_hidden_tokens
        await cluster.stream(prompt="Hi")
        found = await samples_of(cluster)
    assert found["prelude_router_slo_requests_total"] == {("completions", met): 1}


async def test_busy_adapters_are_named(cluster: ClusterStandIn) -> None:
    for _ in range(3):
        await cluster.post(prompt="Hi", adapter="a0")
    await cluster.post(prompt="Hi")
    await cluster.post(prompt="Hi", adapter="nobody")  # names that clients make up get no label
    found = await samples_of(cluster)
    assert found["prelude_router_adapter_request_rate"] == {("a0",): pytest.approx(3 / 60)}
    ensured = found["prelude_router_ensured_adapters_total"]
    assert {outcome: number for outcome, number in ensured.items() if number} == {("loaded",): 1, ("resident",): 2}


async def test_workers_by_state() -> None:
    async with running_cluster(num_prefill=2) as cluster:
        await cluster.prefill[1].change(draining=True)
        await eventually(lambda: cluster.admin("/ready"), lambda page: not page[1]["workers"]["p1"]["ready"])
        found = await samples_of(cluster)
    workers = found["prelude_router_workers"]
    states = {labels for labels, number in workers.items() if number}
    assert states == {("prefill", "placeable"), ("prefill", "draining"), ("decode", "placeable")}
    assert len(workers) == 3 * len(WORKER_STATES)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "placeable"),
        ({"is_blocked": True}, "blocked"),
        ({"is_draining": True}, "draining"),
        ({"is_hung": True, "is_ready": False}, "hung"),
        ({"is_ready": False}, "not_ready"),
        ({"is_engine_up": False}, "not_ready"),
        ({"is_connected": False, "is_hung": True}, "lost"),
    ],
)
def test_the_state_of_a_worker_in_one_word(change: dict[str, bool], state: str) -> None:
    view = replace(PREFILLS[0], **change)
    assert view.condition == state
    assert state in WORKER_STATES
    assert view.is_placeable is (state == "placeable")


# ---- the busiest adapters, with a bounded number of names -----------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_rates_are_those_of_the_last_minute(clock: Clock) -> None:
    adapters = BusiestAdapters(clock)
    for _ in range(60):
        adapters.count("a")
    assert adapters.rates() == {"a": 1.0}
    clock.now += 75  # of the minute before, three quarters are left
    for _ in range(30):
        adapters.count("b")
    assert adapters.rates() == {"a": pytest.approx(0.75), "b": pytest.approx(0.5)}
    clock.now += 120
    assert adapters.rates() == {}


def test_only_twenty_have_a_name_and_no_request_is_lost(clock: Clock) -> None:
    adapters = BusiestAdapters(clock)
    for number in range(50):
        for _ in range(number + 1):
            adapters.count(f"a{number}")
    rates = adapters.rates()
    assert len(rates) == 21
    assert set(rates) == {f"a{number}" for number in range(30, 50)} | {OTHER}
    assert sum(rates.values()) == pytest.approx(50 * 51 / 2 / 60)


def test_memory_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectors, "_MAX_NAMES", 3)
    adapters = BusiestAdapters(clock)
    for number in range(100):
        adapters.count(f"a{number}")
    adapters.count("a1")  # known names are still counted
    assert adapters.rates() == {"a0": 1 / 60, "a1": pytest.approx(2 / 60), "a2": 1 / 60, OTHER: pytest.approx(97 / 60)}


def test_the_page_escapes_hostile_names() -> None:
    metrics = Metrics()
    metrics.busiest_adapters.count('x"} 1\nevil 2')
    assert r'prelude_router_adapter_request_rate{adapter="x\"} 1\nevil 2"}' in metrics.page().decode()


async def test_histograms_have_the_names_of_opentelemetrys_conventions_too() -> None:
    """By operation: chats and responses together. A token is not an event: engines send none for some."""
    async with running_cluster() as cluster:
        cluster.decode[0].engine.num_hidden_tokens = 3
        await cluster.stream(prompt="Hi")
        await cluster.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}])
        await cluster.stream("/v1/responses", input="Hi")
        found = await samples_of(cluster)
    own, theirs = "prelude_router_{}_seconds_{}".format, "gen_ai_server_{}_seconds_{}".format
    chats, completions = ((name, "prelude", MODEL) for name in ("chat", "text_completion"))
    assert found[theirs("request_duration", "count")] == {chats: 2, completions: 1}
    assert found[theirs("time_to_first_token", "count")] == {chats: 1, completions: 1}
    assert found[theirs("time_per_output_token", "count")] == {chats: 1, completions: 1}
    times = found[own("request_duration", "sum")]
    assert found[theirs("request_duration", "sum")][chats] == pytest.approx(times["chat",] + times["responses",])
    after_first_s = times["completions",] - found[own("time_to_first_token", "sum")]["completions",]
    per_token_s = found[theirs("time_per_output_token", "sum")][completions]
    assert per_token_s * (len(WORDS) + 2) == pytest.approx(after_first_s)
    assert found[theirs("request_duration", "bucket")][(*chats, "+Inf")] == 2
