"""What counts as a hang: no progress, and no processor time or far too much of it. A table, under a virtual clock."""

import itertools

import pytest

from engine.hang_watch import SERVER, HangWatch, PartState, Processor, Timeouts

NEVER = (float("inf"), float("inf"))
TIMEOUTS = Timeouts(hang_s=10.0, batch_s=300.0, compute_s=15.0)
SCHEDULER, DETOKENIZER, KV = "scheduler-0", "detokenizer", "kv-0"


def seconds_until(part: str, states) -> tuple[float, float]:
    """After how long the part is suspected, and hung; inf for never within 1,000 s. Other parts are well."""
    watch = HangWatch(TIMEOUTS)
    suspected_s = hung_s = float("inf")
    for at_s, state in zip(range(1001), states, strict=False):
        watch.observe(at_s, {part: state, "scheduler-1": PartState(at_s, Processor(0))})
        if watch.suspicion:
            suspected_s = min(suspected_s, at_s)
            assert part in watch.suspicion
        if watch.is_hung:
            hung_s = min(hung_s, at_s)
    return suspected_s, hung_s


def still(is_asked: bool = True):
    """A stopped or deadlocked part."""
    return itertools.repeat(PartState(7, Processor(50), is_asked))


def computing(share: float = 1.0):
    """One that computes without progress, with a share of a processor."""
    return (PartState(7, Processor(int(100 * share * second))) for second in itertools.count())


def compiling():
    """A scheduler that waits for its compiler, and computes beside."""
    return (PartState(7, Processor(30 * second, child_ticks=100 * second)) for second in itertools.count())


def starved():
    """One that waits for a processor."""
    return itertools.repeat(PartState(7, Processor(50, is_runnable=True)))


@pytest.mark.parametrize(
    ("part", "states", "after"),
    [
        (SCHEDULER, still, (10, 20)),
        (SERVER, still, (10, 20)),
        (DETOKENIZER, still, (10, 20)),
        (SCHEDULER, computing, (15, 60)),  # a loop of its own, or a kernel without end
        (SCHEDULER, lambda: computing(0.5), (30, 120)),
        (SCHEDULER, compiling, (300, 300)),
        (SERVER, compiling, (10, 40)),
        (SERVER, computing, (10, 40)),  # an endless template blocks its loop
        (DETOKENIZER, computing, (10, 40)),
        (SERVER, lambda: computing(0.5), (20, 80)),  # an overloaded machine
        (SERVER, lambda: computing(0.02), (40, 160)),  # one that wakes up for nothing
        (SERVER, starved, NEVER),
        (SCHEDULER, starved, NEVER),
        (KV, lambda: itertools.repeat(PartState(7, None)), (10, 40)),  # a thread's time is not known
        (DETOKENIZER, lambda: still(is_asked=False), NEVER),  # it has nothing to answer
        (KV, lambda: itertools.repeat(PartState(7, None, False)), NEVER),
        (SCHEDULER, lambda: (PartState(n, Processor(50)) for n in itertools.count()), NEVER),  # an idle loop
        # A batch of 200 s that gets one tick of 10 ms in nine seconds, then the next one.
        (SCHEDULER, lambda: (PartState(n // 200, Processor(n // 9)) for n in itertools.count()), NEVER),
    ],
)
def test_when_a_part_is_suspected_and_hung(part: str, states, after: tuple[float, float]):
    assert seconds_until(part, states()) == after


def test_time_in_which_nobody_looked_does_not_count():
    """The whole machine was suspended, or this process starved."""
    watch = HangWatch(TIMEOUTS)
    for at_s in (0.0, 1.0, 400.0, 800.0):
        watch.observe(at_s, {SCHEDULER: PartState(7, Processor(50)), SERVER: PartState(7, Processor(50))})
        assert not watch.suspicion


def test_it_is_taken_back_when_it_progresses():
    watch = HangWatch(TIMEOUTS)
    for second in range(12):
        watch.observe(second, {SCHEDULER: PartState(7, Processor(50))})
    assert watch.suspicion == "the engine's scheduler-0 has shown no progress for 11 s"
    watch.observe(12, {SCHEDULER: PartState(8, Processor(51))})
    assert (watch.suspicion, watch.is_hung) == ("", False)
    for second in range(13, 22):
        watch.observe(second, {SCHEDULER: PartState(8, Processor(51))})
    assert not watch.suspicion


def test_an_engine_that_is_not_warm_may_compile_for_long():
    watch = HangWatch(TIMEOUTS)
    watch.is_warm = False
    states = list(itertools.islice(computing(), 400))
    for second in range(299):
        watch.observe(second, {SCHEDULER: states[second]})
    assert not watch.suspicion
    for second in range(299, 302):
        watch.observe(second, {SCHEDULER: states[second]})
    assert watch.is_hung


def test_what_it_computed_before_it_was_warm_does_not_count():
    watch = HangWatch(TIMEOUTS)
    for second in range(40):
        watch.is_warm = second > 20
        watch.observe(second, {SCHEDULER: PartState(7, Processor(100 * second))})
        assert bool(watch.suspicion) == (second >= 35)
    assert watch.suspicion == "the engine's scheduler-0 has shown no progress for 39 s, though it computes"
    assert not watch.is_hung


def test_a_long_batch_is_progress_for_routers():
    watch = HangWatch(TIMEOUTS)
    for second in range(20):
        watch.observe(second, {SCHEDULER: PartState(7, Processor(second))})
    assert watch.num_signs == 19
    for second in range(20, 40):
        watch.observe(second, {SCHEDULER: PartState(7, Processor(19))})
    assert watch.num_signs == 19
