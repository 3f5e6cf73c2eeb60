"""Workers by Kubernetes: the official client against a double of the API server."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
from support.chart.watched_kubernetes import NAMESPACE, KubernetesApiDouble, endpoint, kubeconfig, kubernetes_api, pod

from cluster.config.discovery import KubernetesDiscovery
from cluster.discovery import kubernetes_api as api_module
from cluster.discovery import kubernetes_source
from cluster.discovery.kubernetes_objects import Agent, Standing, agents_of_pod, agents_of_slice
from cluster.discovery.kubernetes_source import KubernetesSource
from cluster.errors import SourceUnavailable

SERVICE = KubernetesDiscovery(service="prefill")
PODS = KubernetesDiscovery(pods="app=prelude,role=prefill")
PREFILL = {"app": "prelude", "role": "prefill"}


class Following:
    """A source that is followed, and what it has told."""

    def __init__(self, double: KubernetesApiDouble, folder: Path, looked_for=SERVICE, **options) -> None:
        self.double = double
        self.pauses_s: list[float] = []
        self.seen: list[set[str]] = []
        self.source = KubernetesSource(
            looked_for,
            "prefill",
            kubeconfig=kubeconfig(double, folder),
            pause=self.pause,
            **{"only_ready": True, **options},
        )
        self.ends_outage_after_s: float | None = None
        self._changed = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        """The injected clock."""
        self.pauses_s.append(seconds)
        if self.ends_outage_after_s is not None and sum(self.pauses_s) > self.ends_outage_after_s:
            self.double.is_down, self.double.failure = False, None
        await asyncio.sleep(0.001)

    def told(self) -> None:
        self.seen.append(found(self.source))
        self._changed.set()

    async def until(self, *addresses: str) -> None:
        async with asyncio.timeout(60):
            while not self.source.has_answered or found(self.source) != set(addresses):
                self._changed.clear()
                await self._changed.wait()


def found(source: KubernetesSource) -> set[str]:
    assert all((each.role, each.name) == ("prefill", "") for each in source.endpoints)
    return {each.address for each in source.endpoints}


def follow(folder: Path, scenario: Callable[[Following], Awaitable[None]], looked_for=SERVICE, **options) -> None:
    async def run() -> None:
        async with kubernetes_api() as double:
            following = Following(double, folder, looked_for, **options)
            task = asyncio.create_task(following.source.follow(following.told))
            try:
                await scenario(following)
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


async def two_workers(double: KubernetesApiDouble) -> None:
    await double.set_slice("a", "prefill", 9000, [endpoint("10.0.0.1"), endpoint("10.0.0.2")])


@pytest.mark.slow
def test_a_service_is_followed(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await it.until()
        assert it.seen == [set()]  # the first answer is told, though there is nobody
        await two_workers(it.double)
        await it.double.set_slice("other", "decode", 9000, [endpoint("10.0.0.9")])
        await it.double.set_slice("six", "prefill", 9001, [endpoint("fd00::1")], kind="IPv6")
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "[fd00::1]:9001")
        await it.double.set_slice(
            "a", "prefill", 9000, [endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", terminating=True)]
        )
        await it.until("[fd00::1]:9001")  # at once: nobody waits for the Pod to be gone
        await it.double.set_slice("a", "prefill", 9000, [endpoint("10.0.0.1", ready=None)])  # unknown counts as ready
        await it.until("10.0.0.1:9000", "[fd00::1]:9001")
        assert it.double.num_lists == 1
        assert it.double.num_watches == 1
        assert it.double.queries[0]["labelSelector"] == "kubernetes.io/service-name=prefill"

    follow(tmp_path, scenario)


def test_pods_are_followed(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await it.double.put("pods", "a", PREFILL, pod("10.0.0.1"))
        await it.double.put("pods", "b", PREFILL, pod("10.0.0.2", ready=False))
        await it.double.put("pods", "c", {**PREFILL, "role": "decode"}, pod("10.0.0.3"))
        await it.until("10.0.0.1:9000")
        await it.double.put("pods", "b", PREFILL, pod("10.0.0.2"))
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.put("pods", "a", PREFILL, pod("10.0.0.1", ending=True))
        await it.until("10.0.0.2:9000")
        await it.double.put("pods", "b", PREFILL, pod("10.0.0.2", phase="Failed"))
        await it.until()

    follow(tmp_path, scenario, PODS)


def test_peers_find_each_other_before_they_are_ready(tmp_path: Path) -> None:
    """Else none of a pair would ever be: their agents are ready once they have reached each other."""

    async def scenario(it: Following) -> None:
        starting, ending = endpoint("10.0.0.1", ready=False), endpoint("10.0.0.2", ready=False, terminating=True)
        await it.double.set_slice("a", "prefill", 9000, [starting, ending])
        await it.until("10.0.0.1:9000")

    follow(tmp_path, scenario, only_ready=False)


def test_a_long_list_comes_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_PAGE", 3)

    async def scenario(it: Following) -> None:
        await it.double.set_service("prefill", [f"10.0.0.{number}:9000" for number in range(1, 9)])
        await it.source.refresh()
        assert len(it.source.endpoints) == 8
        monkeypatch.setattr(api_module, "_MAX_LIST_BYTES", 1000)
        with pytest.raises(SourceUnavailable, match="the list of endpointslices has over 0 MiB; select fewer"):
            await it.source.refresh()
        assert len(it.source.endpoints) == 8

    follow(tmp_path, scenario)


def test_an_endpoint_that_moves_between_slices_never_leaves(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.set_slice("a", "prefill", 9000, [endpoint("10.0.0.1")])
        await it.double.set_slice("b", "prefill", 9000, [endpoint("10.0.0.2")])
        await it.double.set_slice("c", "prefill", 9000, [endpoint("10.0.0.3")])
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")
        assert all({"10.0.0.1:9000", "10.0.0.2:9000"} <= seen for seen in it.seen[-2:])
        # In two slices at once, of which one is late: it ends.
        await it.double.set_slice("d", "prefill", 9000, [endpoint("10.0.0.3", terminating=True)])
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        # Its address passes to another Pod.
        await it.double.set_slice("e", "prefill", 9000, [endpoint("10.0.0.3", pod="the next one")])
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")

    follow(tmp_path, scenario)


def test_who_is_in_no_slice_leaves_after_a_moment(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.delete("endpointslices", "a")
        await it.until()
        assert it.source._leaving == {}
        assert it.source._objects == {}

    follow(tmp_path, scenario, grace_s=0.05)


@pytest.mark.parametrize("with_bookmarks", [True, False])
def test_an_expired_watch_lists_anew(tmp_path: Path, with_bookmarks: bool) -> None:
    async def scenario(it: Following) -> None:
        it.double.bookmarks = with_bookmarks
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.watches(1)
        it.double.is_down = True
        it.double.cut()
        await it.double.set_slice("a", "prefill", 9000, [endpoint("10.0.0.2", ready=False)])
        await it.double.set_slice("b", "prefill", 9000, [endpoint("10.0.0.3")])
        await it.double.compact()  # and so nobody will be told of these changes
        it.double.is_down = False
        await it.until("10.0.0.1:9000", "10.0.0.3:9000")
        assert it.double.num_lists == 2

    follow(tmp_path, scenario, grace_s=60)


def test_a_bookmark_moves_the_version(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await it.until()
        for _ in range(5):  # of other services: the watch does not see them, but its bookmark counts them
            await it.double.set_slice("z", "decode", 9000, [])
        await it.double.send(
            b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"%d"}}}\n' % it.double.version
        )
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        it.double.oldest = it.double.version
        it.double.cut()
        await it.double.watches(2)
        await it.double.delete("endpointslices", "a")
        await it.until()
        assert it.double.num_lists == 1

    follow(tmp_path, scenario, grace_s=0.01)


def test_a_watch_that_ends_goes_on_from_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_source, "_WATCH_S", 0)  # ends at once: no tight loop
    monkeypatch.setattr(kubernetes_source, "_MIN_WATCH_S", 100)

    async def scenario(it: Following) -> None:
        await it.double.watches(3)
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        assert it.double.num_lists == 1
        assert all(pause_s >= 0.4 for pause_s in it.pauses_s)
        assert len(it.pauses_s) >= 2

    follow(tmp_path, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["down", 500, 429])
def test_an_outage_of_a_minute_keeps_the_fleet(tmp_path: Path, failure, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.watches(1)
        it.ends_outage_after_s = 60
        it.double.is_down = failure == "down"
        it.double.failure = None if failure == "down" else (failure, "later")
        await it.double.set_slice("b", "prefill", 9000, [endpoint("10.0.0.3")])
        it.double.cut()
        while sum(it.pauses_s) <= 60:
            assert {"10.0.0.1:9000", "10.0.0.2:9000"} <= found(it.source)
            await asyncio.sleep(0.001)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")
        assert it.double.num_lists == 1  # the watch goes on
        assert 6 <= len(it.pauses_s) <= 12
        assert it.pauses_s[0] < 0.7
        assert max(it.pauses_s) <= 18

    follow(tmp_path, scenario)
    texts = [record.getMessage() for record in caplog.records if "looked up" in record.getMessage()]
    kept, over = "workers cannot be looked up; keeping those that are known", "workers are looked up again"
    assert texts in ([kept, over], [kept, kept, over])  # the cut connection, then what new ones meet


def test_watches_that_fail_once_they_are_open_come_ever_slower(tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.watches(1)
        it.double.cuts_watches = True
        it.double.cut()
        await it.double.watches(6)
        assert all(later > earlier for earlier, later in pairwise(it.pauses_s[:5]))
        it.double.cuts_watches = False
        await it.double.set_slice("b", "prefill", 9000, [endpoint("10.0.0.3")])
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")
        num_pauses = len(it.pauses_s)
        it.double.cut()
        await it.double.watches(it.double.num_watches + 1)
        assert it.pauses_s[num_pauses] < 0.7  # the event has ended the outage

    follow(tmp_path, scenario)
    texts = [each.getMessage() for each in caplog.records]
    assert texts.count("workers are looked up again") == 1


def test_watches_that_expire_after_every_list_come_ever_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an API server that is behind its own lists: each list succeeds, and costs it much."""
    monkeypatch.setattr(kubernetes_source, "_MIN_WATCH_S", 60)  # a machine that stalls must not make a watch a good one

    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.watches(1)
        it.double.oldest = it.double.version + 1000
        it.double.cut()
        await it.double.watches(6)
        assert it.double.num_lists >= 3
        assert all(later > earlier for earlier, later in pairwise(it.pauses_s[:5]))
        assert found(it.source) == {"10.0.0.1:9000", "10.0.0.2:9000"}
        it.double.oldest = 0
        await it.double.set_slice("b", "prefill", 9000, [endpoint("10.0.0.3")])
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")

    follow(tmp_path, scenario)


def test_an_open_watch_without_events_ends_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(kubernetes_source, "_MIN_WATCH_S", 0.05)

    async def scenario(it: Following) -> None:
        it.double.bookmarks = False
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.watches(1)
        it.double.cut()
        for _ in range(1000):
            if "workers are looked up again" in caplog.text:
                return
            await asyncio.sleep(0.01)
        pytest.fail("the outage does not end")

    follow(tmp_path, scenario)


def test_an_api_server_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_ANSWER_S", 0.2)

    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        it.double.is_silent = True
        with pytest.raises(SourceUnavailable, match="the API server does not answer"):
            await it.source.refresh()

    follow(tmp_path, scenario)


@pytest.mark.parametrize(
    "line", [b"no JSON\n", b"[]\n", b"{}\n", b'{"type":"ADDED","object":3}\n', b'{"type":"ERROR","object":{}}\n']
)
def test_what_is_no_event_ends_the_watch_only(tmp_path: Path, line: bytes) -> None:
    async def scenario(it: Following) -> None:
        await two_workers(it.double)
        await it.until("10.0.0.1:9000", "10.0.0.2:9000")
        await it.double.watches(1)
        await it.double.send(line)
        await it.double.watches(2)
        await it.double.set_slice("a", "prefill", 9000, [endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False)])
        await it.until("10.0.0.1:9000")

    follow(tmp_path, scenario)


def test_errors_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reason(source: KubernetesSource) -> str:
        with pytest.raises(SourceUnavailable) as refused:
            await source.refresh()
        return str(refused.value)

    async def scenario(it: Following) -> None:
        config = kubeconfig(it.double, tmp_path)
        elsewhere = KubernetesDiscovery(service="prefill", namespace="elsewhere")
        forbidden = await reason(KubernetesSource(elsewhere, "prefill", kubeconfig=config))
        assert forbidden == (
            "list endpointslices in namespace elsewhere: the API server answers 403: cannot list resource in the "
            'namespace "elsewhere". Give the service account the verbs list and watch on endpointslices (API group '
            '"discovery.k8s.io") by a Role'
        )
        config = kubeconfig(it.double, tmp_path, token="old")
        assert "Its token is not accepted" in await reason(KubernetesSource(PODS, "prefill", kubeconfig=config))
        missing = await reason(KubernetesSource(PODS, "prefill", kubeconfig=tmp_path / "missing"))
        assert missing.startswith(f"discovery.kubeconfig: {tmp_path}/missing cannot be used: ")
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        assert await reason(KubernetesSource(PODS, "prefill")) == (
            "this process has no service account of Kubernetes: Service host/port is not set. Run it in a Pod with "
            "automountServiceAccountToken, or name a file in discovery.kubeconfig"
        )

    follow(tmp_path, scenario)


def test_objects_beyond_the_bound_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(kubernetes_source, "_MAX_OBJECTS", 3)

    async def scenario(it: Following) -> None:
        await it.until()
        await it.double.set_service("prefill", [f"10.0.0.{number}:9000" for number in range(1, 9)])
        await it.until("10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000")
        await it.source.refresh()
        assert len(it.source._objects) == 3

    follow(tmp_path, scenario)
    assert [each.getMessage() for each in caplog.records].count(
        "more Kubernetes objects selected than can be followed; ignoring the rest"
    ) == 1


@pytest.mark.parametrize(
    "spoilt",
    [
        {},
        {"endpoints": None, "ports": None},
        {"endpoints": [3, {"addresses": "10.0.0.1"}, {"addresses": [7]}, {"addresses": ["host"]}], "ports": [{}]},
        {"endpoints": [{"addresses": ["0.0.0.0"]}, {"addresses": ["224.0.0.1"]}, {"addresses": []}]},
        {"metadata": [], "spec": {"containers": [{"ports": 3}]}, "status": {"podIP": "10.0.0.1", "conditions": 3}},
    ],
)
def test_objects_of_another_shape_bring_nobody(spoilt: dict) -> None:
    assert agents_of_slice(spoilt, 9000) == {}
    assert Standing.READY not in agents_of_pod(spoilt, 9000).values()
    assert agents_of_pod(spoilt, "control") == {}


def test_ports_by_name() -> None:
    ports = [{"name": "metrics", "port": 9100}, {"name": "control", "port": 9001}]
    found_slice = {"endpoints": [endpoint("10.0.0.1", pod="x")], "ports": ports}
    assert agents_of_slice(found_slice, "control") == {Agent("10.0.0.1:9001", "x"): Standing.READY}
    assert agents_of_slice(found_slice, 7) == {Agent("10.0.0.1:7", "x"): Standing.READY}
    assert agents_of_slice(found_slice, "absent") == {}
    assert agents_of_slice({**found_slice, "ports": [{"name": "control", "port": 70000}]}, "control") == {}


def test_others_do_not_import_the_client() -> None:
    code = (
        "import sys; from cluster.config.schema import DiscoveryConfig as D; "
        "from cluster.discovery.configured import configured_sources as c; "
        "found = c(D.model_validate({'decode': {'kubernetes': {'service': 'd'}}})); "
        "assert found[0].label == 'Kubernetes service d', found; assert 'kubernetes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_namespace_is_that_of_the_context(tmp_path: Path) -> None:
    async def scenario(it: Following) -> None:
        await it.until()
        assert f"/namespaces/{NAMESPACE}/" in it.double.queries[0]["path"]

    follow(tmp_path, scenario)
