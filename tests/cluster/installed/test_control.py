"""The agents' control service, and draining."""

import threading

import httpx
from support.clusters.running_cluster import RunningCluster
from support.waiting import wait_until

from cluster.control import control_pb2 as pb
from engine.hooks.ledger import hooks_for
from engine.pin import SGLANG_VERSION

REQUEST = {"model": "demo", "prompt": "The sea", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


def test_describe_and_watch(cluster: RunningCluster):
    cluster.wait_ready(90)
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**REQUEST, "max_tokens": 1, "adapter": "a0"}, timeout=60)
    assert answer.status_code == 200
    with cluster.control("prefill-0") as control:
        description = control.Describe(pb.DescribeRequest(), timeout=5)
        assert (description.name, description.role) == ("prefill-0", pb.ROLE_PREFILL)
        assert description.engine_version == SGLANG_VERSION
        assert list(description.hooks) == [hook.name for hook in hooks_for("prefill", "cpu")]
        stream = control.WatchState(pb.WatchStateRequest(heartbeat_s=0.2), timeout=10)
        first, second = next(stream), next(stream)
        assert first.ready
        assert first.residency.snapshot
        assert answer.headers["x-prelude-revision"] in first.residency.resident
        assert [pair.decode_name for pair in first.warm_pairs] == ["decode-0"]
        assert not second.residency.snapshot
        stream.cancel()


def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(cluster: RunningCluster):
    cluster.wait_ready(90)
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{cluster.url}/v1/completions", json=REQUEST, timeout=120))

    with cluster.control("decode-0") as control:
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: cluster.loads()["decode-0"][0])
        drained = control.Drain(pb.DrainRequest(deadline_s=60), timeout=70)
        asking.join()
        assert drained.idle
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        late = httpx.post(f"{cluster.url}/v1/completions", json=REQUEST, timeout=60)
        assert late.status_code == 503
        assert late.headers["retry-after"]
        assert httpx.get(f"{cluster.url}/ready").status_code == 503
        assert control.Undrain(pb.UndrainRequest(), timeout=10).was_draining
    cluster.wait_ready(90)
    assert httpx.post(f"{cluster.url}/v1/completions", json=REQUEST, timeout=60).status_code == 200
