"""The index of who holds a revision says what the workers' residencies say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.control import control_pb2 as control
from router.fleet.fleet_state import Holders, WorkerResidency

IDS = ["sha256:ab", "sha256:cd", "sha256:ef"]
DELTAS = st.builds(
    control.ResidencyDelta,
    snapshot=st.booleans(),
    resident=st.lists(st.sampled_from(IDS)),
    evicted=st.lists(st.sampled_from(IDS)),
    on_disk=st.lists(st.sampled_from(IDS)),
)


@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(DELTAS, st.none()))))
def test_any_deltas_and_new_streams(events: list[tuple[int, control.ResidencyDelta | None]]) -> None:
    holders = Holders()
    residencies = [WorkerResidency(holders) for _ in range(3)]
    for worker, delta in events:
        if delta is not None:
            residencies[worker].apply(delta)
        else:  # a new stream takes over
            before = set(residencies[worker].host)
            residencies[worker].leave()
            assert residencies[worker].host == before  # still readable
            residencies[worker] = WorkerResidency(holders)
        for revision_id in IDS:
            found = holders.of(revision_id)
            assert len(found) == len(set(found))
            assert set(found) == {each for each in residencies if revision_id in each.host}


def test_nothing_stays_behind() -> None:
    holders = Holders()
    residency = WorkerResidency(holders)
    residency.apply(control.ResidencyDelta(resident=IDS))
    residency.leave()
    residency.apply(control.ResidencyDelta(resident=[*IDS, "sha256:00"]))  # too late
    assert not any(map(holders.of, [*IDS, "sha256:00"]))
