"""What workers say of their residency, as the router keeps it."""

from hypothesis import given
from hypothesis import strategies as st
from support.router_stand_ins import running_cluster, until

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import Holders, WorkerResidency


def ids(*numbers: int) -> list[str]:
    return [f"sha256:{number:064x}" for number in numbers]


def test_deltas() -> None:
    residency = WorkerResidency()
    residency.apply(control.ResidencyDelta(resident=ids(9), on_disk=ids(9)))
    residency.apply(control.ResidencyDelta(snapshot=True, resident=ids(1, 2), on_disk=ids(1, 2, 3)))
    residency.apply(control.ResidencyDelta(resident=ids(4), on_disk=ids(4)))  # the snapshot's second message
    assert (residency.host, residency.disk) == (set(ids(1, 2, 4)), set(ids(1, 2, 3, 4)))
    residency.apply(control.ResidencyDelta(evicted=ids(1, 7), off_disk=ids(3)))
    assert (residency.host, residency.disk) == (set(ids(2, 4)), set(ids(1, 2, 4)))
    residency.apply(control.ResidencyDelta())
    assert (residency.host, residency.disk) == (set(ids(2, 4)), set(ids(1, 2, 4)))


def test_what_is_in_memory_only() -> None:
    residency = WorkerResidency()
    residency.apply(control.ResidencyDelta(snapshot=True, in_memory_only=ids(1, 2), resident=ids(1, 3), kept=ids(1, 2)))
    assert residency.memory_only == residency.kept == set(ids(1, 2))
    assert [residency.can_use_unstored(each) for each in ids(1, 2, 3, 4)] == [True, True, True, False]
    residency.apply(control.ResidencyDelta(evicted=ids(1, 3)))  # its engine ended
    assert [residency.can_use_unstored(each) for each in ids(1, 2, 3)] == [True, True, False]
    residency.apply(control.ResidencyDelta(not_in_memory_only=ids(1), not_kept=ids(1)))
    assert residency.memory_only == residency.kept == set(ids(2))
    residency.apply(control.ResidencyDelta(snapshot=True))
    assert residency.memory_only == residency.kept == set()


async def test_who_has_a_revision() -> None:
    one, other = ids(1, 2)
    async with running_cluster(2, 1) as cluster:
        fleet = cluster.fleet
        first, second = cluster.prefill
        await first.make_resident(one)
        await second.make_resident(one)
        await second.send_delta(on_disk=[other])
        await until(lambda: fleet.workers_with(one) == ("p0", "p1"))
        await until(lambda: fleet.holders_of([other])[0]["disk"] == ["p1"])
        assert fleet.workers_with(other) == ()
        await first.send_delta(evicted=[one])
        await until(lambda: fleet.workers_with(one) == ("p1",))
        await second.stop_agent()  # what it had is not known any more
        await until(lambda: fleet.workers_with(one) == ())
        second.resident.clear()
        await second.restart_agent()
        await until(lambda: cluster.view("p1").is_connected)
        assert fleet.workers_with(one) == ()


IDS = ids(1, 2, 3)
DELTAS = st.builds(
    control.ResidencyDelta,
    snapshot=st.booleans(),
    resident=st.lists(st.sampled_from(IDS)),
    evicted=st.lists(st.sampled_from(IDS)),
    on_disk=st.lists(st.sampled_from(IDS)),
)


@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(DELTAS, st.none()))))
def test_the_index_of_holders_says_what_residencies_say(
    events: list[tuple[int, control.ResidencyDelta | None]],
) -> None:
    holders = Holders()
    residencies = [WorkerResidency(holders) for _ in range(3)]
    for worker, delta in events:
        if delta is not None:
            residencies[worker].apply(delta)
        else:  # a new stream takes over
            before = set(residencies[worker].host)
            residencies[worker].leave()
            assert residencies[worker].host == before  # still readable
            residencies[worker].apply(control.ResidencyDelta(resident=IDS))  # too late
            residencies[worker] = WorkerResidency(holders)
        for revision_id in IDS:
            found = holders.of(revision_id)
            assert len(found) == len(set(found))
            assert set(found) == {each for each in residencies if revision_id in each.host}
