"""What this router has placed at workers, and how fast they read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers.virtual_time import Clock

from router.fleet.worker_loads import Spent, WorkerLoad, WorkerLoads


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loads(clock: Clock) -> WorkerLoads:
    return WorkerLoads(clock)


def test_a_hold_counts_until_it_is_released_once(loads: WorkerLoads) -> None:
    in_flight = [loads.add("p0", prompt_tokens=100, kv_tokens=300, revision_id="r1") for _ in range(2)]
    load = loads["p0"]
    assert (load.num_sequences, load.prompt_tokens, load.placed_kv_tokens, load.revisions) == (2, 200, 600, {"r1": 2})
    in_flight[0].read_ended()
    in_flight[0].read_ended()
    assert (load.num_sequences, load.prompt_tokens, load.placed_kv_tokens) == (2, 100, 600)
    for _ in range(2):
        in_flight[0].release()
    assert (load.num_sequences, load.prompt_tokens, load.placed_kv_tokens, load.revisions) == (1, 100, 300, {"r1": 1})


def test_the_rate_follows_what_was_read_while_it_was_busy(loads: WorkerLoads, clock: Clock) -> None:
    for _ in range(200):
        read_prompt(loads, clock, "p0", 0.5)
        clock.now += 3  # idle: does not count
    assert loads["p0"].tokens_per_s == pytest.approx(1000, rel=0.1)
    loads.add("p0", prompt_tokens=2000)
    assert loads["p0"].queue_s == loads["p0"].wait_s == pytest.approx(2, rel=0.1)


def read_prompt(loads: WorkerLoads, clock: Clock, worker: str, seconds: float) -> None:
    """500 tokens."""
    in_flight = loads.add(worker, prompt_tokens=500)
    in_flight.read_begins()
    clock.now += seconds
    in_flight.read_ended()
    in_flight.release()


def test_a_worker_that_was_not_seen_is_taken_for_as_fast_as_the_others(loads: WorkerLoads, clock: Clock) -> None:
    """Else an idle fleet's prompts would all go to the first worker that was seen."""
    assert (loads["p1"].tokens_per_s, loads["p1"].is_assumed) == (5000, True)
    for _ in range(20):
        read_prompt(loads, clock, "p0", 0.02)
    assert not any(loads[each].is_assumed for each in ("p0", "p1", "p2"))  # of the fleet, at least
    assert loads["p0"].tokens_per_s == pytest.approx(25_000, rel=0.1)
    for later in ("p1", "p2"):
        assert loads[later].tokens_per_s == pytest.approx(25_000, rel=0.1)


def test_a_worker_that_was_slow_once_is_tried_again(loads: WorkerLoads, clock: Clock) -> None:
    """An engine compiles kernels for its first prompts."""
    for _ in range(50):
        read_prompt(loads, clock, "p0", 0.02)
    read_prompt(loads, clock, "p1", 20)
    assert loads["p1"].tokens_per_s < 1000
    for _ in range(10):
        clock.now += 60
        loads["p1"].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=0)
        for _ in range(20):
            read_prompt(loads, clock, "p0", 0.02)
    assert loads["p1"].tokens_per_s == pytest.approx(loads["p0"].tokens_per_s, rel=0.2)
    read_prompt(loads, clock, "p1", 0.02)  # what was forgotten stays forgotten
    assert loads["p1"].tokens_per_s == pytest.approx(loads["p0"].tokens_per_s, rel=0.2)


def test_new_prompts_outweigh_many_that_were_read_from_prefix_caches(loads: WorkerLoads, clock: Clock) -> None:
    for _ in range(20_000):
        read_prompt(loads, clock, "p0", 0.0005)
    assert loads["before"].tokens_per_s == pytest.approx(1_000_000, rel=0.1)
    for _ in range(1500):
        read_prompt(loads, clock, "p0", 0.02)
    assert loads["after"].tokens_per_s == pytest.approx(25_000, rel=0.2)


def test_a_slow_worker_is_not_taken_for_faster_while_it_reads(loads: WorkerLoads, clock: Clock) -> None:
    for _ in range(50):
        read_prompt(loads, clock, "p0", 0.02)
        read_prompt(loads, clock, "p1", 0.2)
    before = loads["p1"].tokens_per_s
    assert before == pytest.approx(2500, rel=0.2)  # it is known for slow, beside one that is fast
    in_flight = loads.add("p1", prompt_tokens=100_000)
    in_flight.read_begins()
    clock.now += 120
    loads["p1"].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=0)
    assert loads["p1"].tokens_per_s == pytest.approx(before, rel=0.01)


def test_prompts_read_side_by_side_share_the_time(loads: WorkerLoads, clock: Clock) -> None:
    for _ in range(100):
        in_flight = [loads.add("p0", prompt_tokens=500) for _ in range(4)]
        for each in in_flight:
            each.read_begins()
        clock.now += 1
        for each in in_flight:
            each.read_ended()
            each.release()
    assert loads["p0"].tokens_per_s == pytest.approx(2000, rel=0.1)


def report_reading(loads: WorkerLoads, tokens: int, seconds: float) -> None:
    """An engine's counts since its start."""
    spent = Spent(round(seconds * 1e6))
    loads["u0"].report(loads.clock(), used_kv_tokens=0, max_kv_tokens=0, read_tokens=tokens, spent=spent)


def test_answers_that_do_not_show_when_their_prompt_was_read(loads: WorkerLoads, clock: Clock) -> None:
    """The engine counts how long it reads; the answers say how much of their prompts it did not have to read."""
    report_reading(loads, 10_000, 1.0)
    for i in range(1, 101):
        in_flight = loads.add("u0", prompt_tokens=500)
        in_flight.is_seen = False
        in_flight.read_begins()
        clock.now += 5  # it generates long
        report_reading(loads, 10_000 + 250 * i, 1 + 0.5 * i)
        in_flight.read_ended()
        in_flight.learn_read(500, cached_tokens=250)
        in_flight.release()
    assert loads["u0"].tokens_per_s == pytest.approx(1000, rel=0.1)


@pytest.mark.parametrize("is_given_up", [True, False])
def test_what_does_not_show_when_a_prompt_was_read_says_nothing_of_the_rate(
    is_given_up: bool, loads: WorkerLoads, clock: Clock
) -> None:
    before = loads["u0"].tokens_per_s
    for _ in range(50):
        in_flight = loads.add("u0", prompt_tokens=500)
        in_flight.read_begins()
        clock.now += 60 if is_given_up else 0.01
        if not is_given_up:
            in_flight.is_seen = False
            in_flight.read_ended()
            in_flight.learn_read(500, cached_tokens=0)  # its agent, of an earlier release, reports no counts
        in_flight.release()
    assert loads["u0"].tokens_per_s == before


def test_an_engine_s_counts(loads: WorkerLoads, clock: Clock) -> None:
    def s_per_token() -> float:
        return loads["u0"].reported_reading.s_per_token

    report_reading(loads, 1_000, 50.0)  # before this router looked
    assert s_per_token() == 0
    clock.now += 2
    report_reading(loads, 3_000, 51.0)
    assert s_per_token() == pytest.approx(1 / 2000)
    clock.now += 1  # nothing was read
    report_reading(loads, 3_000, 51.0)
    clock.now += 1
    report_reading(loads, 5_000, 55.0)  # batches overlap: no more than the time that has passed
    assert s_per_token() == pytest.approx((1 + 2) / 4000)
    report_reading(loads, 0, 0.0)  # a new engine
    report_reading(loads, 100, 30.0)
    assert s_per_token() == pytest.approx((1 + 2) / 4000)
    for i in range(1, 200):
        clock.now += 1
        report_reading(loads, 100 + 100 * i, 30.0 + i)
    assert s_per_token() == pytest.approx(1 / 100, rel=0.01)  # follows its worker


def test_a_report_and_what_was_placed(loads: WorkerLoads) -> None:
    loads["d0"].report(loads.clock(), used_kv_tokens=500, max_kv_tokens=1000)
    assert loads["d0"].used_kv_tokens == 500
    in_flight = loads.add("d0", kv_tokens=700)  # the next report may lag behind it
    assert loads["d0"].used_kv_tokens == 700
    loads["d0"].report(loads.clock(), used_kv_tokens=900, max_kv_tokens=1000)
    assert loads["d0"].used_kv_tokens == 900
    in_flight.release()
    assert loads["d0"].used_kv_tokens == 900


def test_a_worker_that_left_is_forgotten_at_once_and_says_when_nothing_is_in_flight(loads: WorkerLoads) -> None:
    idle: list[str] = []
    in_flight = [loads.add("p0", prompt_tokens=1) for _ in range(2)]
    loads.forget("p0", on_idle=lambda: idle.append("p0"))
    assert "p0" not in list(loads)
    back = loads.add("p0", prompt_tokens=7)  # another worker of that name
    in_flight[0].release()
    assert idle == []
    in_flight[1].release()
    in_flight[1].release()
    assert idle == ["p0"]
    assert (loads["p0"].num_sequences, loads["p0"].prompt_tokens) == (1, 7)
    back.release()
    loads.forget("p0", on_idle=lambda: idle.append("nothing was in flight"))
    assert idle == ["p0", "nothing was in flight"]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["begin", "end", "give up", "release"]), st.floats(0, 5))))
def test_no_order_of_events_leaves_anything_behind(events: list[tuple[int, str, float]]) -> None:
    clock = Clock()
    loads = WorkerLoads(clock)
    in_flight = [loads.add("p0", prompt_tokens=10 * i, kv_tokens=i, revision_id=f"r{i % 2}") for i in range(4)]
    for index, event, pause_s in events:
        clock.now += pause_s
        match event:
            case "begin":
                in_flight[index].read_begins()
            case "end":
                in_flight[index].read_ended()
            case "give up":
                in_flight[index].read_ended(was_read=False)
            case _:
                in_flight[index].release()
        load = loads["p0"]
        assert load.prompt_tokens >= 0
        assert 0 < load.s_per_token <= 1.0
    for each in in_flight:
        each.release()
    load = loads["p0"]
    assert (load.num_sequences, load.prompt_tokens, load.placed_kv_tokens, load.revisions) == (0, 0, 0, {})
    assert (load._num_reading, load.num_at_engine) == (0, 0)


def test_the_time_of_a_decode_step_is_without_prompts_between_steps() -> None:
    load = WorkerLoad()

    def report(now: float, *spent: int) -> float:
        load.report(now, used_kv_tokens=0, max_kv_tokens=0, spent=Spent(*spent))
        return load.reported_steps.step_s

    assert report(10.0, 5_000_000, 700, 9_000_000) == 0  # where counting begins
    assert report(11.0, 5_400_000, 750, 9_400_000) == pytest.approx(0.008)
    assert report(12.0, 5_900_000, 750, 9_400_000) == pytest.approx(0.008)  # prompts only
    # Overlapping batches: both together took no longer than the second and the one before it.
    assert report(13.0, 7_300_000, 800, 10_400_000) == pytest.approx((0.9 * 0.4 + 0.1) / (0.9 * 50 + 50))
    before = load.reported_steps.step_s
    assert report(14.0, 0, 10, 80_000) == before  # its engine has started again
    assert report(15.0, 0, 110, 1_080_000) == pytest.approx((0.9 * (0.9 * 0.4 + 0.1) + 1.0) / (0.9 * 95 + 100))
