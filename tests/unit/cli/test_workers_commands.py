"""`prelude workers list | drain | undrain | set-role` against stand-ins of agents."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.clusters.dns_server import dns_server
from support.clusters.served_agent import served
from support.commands import Prelude
from support.in_thread import in_thread
from support.waiting import wait_until

from cli.agents import agents_of
from cluster.config.load import load_cluster_config
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlServicer
from cluster.local.running import record_of, recorded
from process.free_ports import free_port

FOUND_PORT = free_port()  # of the agents that are found


class Agent(WorkerControlServicer):
    """Of a unified worker that drains at once, unless it is busy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = pb.WorkerState(engine_state=pb.ENGINE_STATE_UP, ready=True, load=pb.Load(max_kv_tokens=100))
        self.deadlines: list[float] = []
        self.role_requests: list[pb.ChangeRoleRequest] = []
        self.may_change: threading.Event | None = None
        self.is_stopping = False
        self.role = pb.ROLE_UNIFIED
        self.descriptions: list[int] = []  # roles that it says first
        self.states: list[pb.WorkerState] = []  # what each stream says first

    async def Describe(self, request, context) -> pb.WorkerDescription:
        role = self.descriptions.pop(0) if self.descriptions else self.role
        url = "http://127.0.0.1:9"
        fields = {"metrics_port": 9101} if self.name == "a" else {"kv_host": "127.0.0.1", "kv_bootstrap_port": 9}
        return pb.WorkerDescription(name=self.name, role=role, model="demo", engine_url=url, **fields)

    async def WatchState(self, request, context):
        if self.is_stopping:
            return
        if self.states:
            yield self.states.pop(0)
            return
        yield self.state
        await asyncio.Event().wait()

    async def Drain(self, request, context) -> pb.DrainResponse:
        self.deadlines.append(request.deadline_s)
        self.state.draining = True
        return pb.DrainResponse(idle=self.state.load.running_requests == 0)

    async def Undrain(self, request, context) -> pb.UndrainResponse:
        if self.is_stopping:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "worker b is stopping")
        was_draining, self.state.draining = self.state.draining, False
        return pb.UndrainResponse(was_draining=was_draining)

    async def ChangeRole(self, request, context) -> pb.ChangeRoleResponse:
        self.role_requests.append(request)
        if self.is_stopping:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "worker b is stopping")
        if self.may_change is not None:
            await asyncio.to_thread(self.may_change.wait, 30)
        self.role = request.role
        return pb.ChangeRoleResponse()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch) -> Iterator[tuple[Agent, Agent]]:
    a, b = Agent("a"), Agent("b")
    with served(a) as a_port, served(b) as b_port:
        (tmp_path / "cluster.yaml").write_text(
            "model: {path: ., name: demo}\nrouter: {drain_timeout_s: 7}\nworkers:\n"
            f"  a: {{role: unified, control_port: {a_port}, drain_timeout_s: 3}}\n"
            f"  b: {{role: unified, control_port: {b_port}}}\n"
        )
        monkeypatch.chdir(tmp_path)
        yield a, b


@pytest.fixture
def workers(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("workers",))


def audited(prelude: Prelude) -> list[tuple[str, str, str]]:
    """Action, object and outcome of each event."""
    events = [json.loads(line) for line in prelude.prints("audit").splitlines()]
    assert all(event["who"].endswith("command line)") and event["tenant"] is None for event in events)
    return [(event["action"], event["object"], event["outcome"]) for event in events]


def test_drain_and_undrain(agents: tuple[Agent, Agent], workers: Prelude):
    a, b = agents
    assert workers("drain", "a", "b") == (0, "a is drained\nb is drained\n", "")
    assert (a.deadlines, b.deadlines) == ([3.0], [7.0])  # the worker's own, else the router's
    assert workers("undrain", "a") == (0, "a takes requests\n", "")
    assert workers("undrain", "a") == (0, "a takes requests, as before\n", "")
    assert (a.state.draining, b.state.draining) == (False, True)
    workers("drain", "a", "--deadline", "0.5")
    assert a.deadlines == [3.0, 0.5]


def test_set_role(agents: tuple[Agent, Agent], workers: Prelude, prelude: Prelude):
    agents[1].is_stopping = True
    said = "prelude: b: failed_precondition: worker b is stopping"
    output = workers.refuses("set-role", "decode", "a", "b", says=said)
    assert re.fullmatch(r"a takes requests as a decode worker: drained after 0\.\d s, ready 0\.\d s later\n", output)
    asked = [pb.ChangeRoleRequest(role=pb.ROLE_DECODE, deadline_s=each) for each in (3, 7)]
    assert (agents[0].role, [each.role_requests for each in agents]) == (pb.ROLE_DECODE, [[each] for each in asked])
    assert audited(prelude) == [
        ("worker.set_role", "a", "done"),
        ("worker.set_role", "b", "failed_precondition"),
    ]
    assert workers("set-role", "unified", "a")[0] == 2


def test_setting_a_role_waits_until_the_worker_has_it(agents: tuple[Agent, Agent], workers: Prelude):
    agents[0].descriptions = 5 * [pb.ROLE_PREFILL]
    not_ready = pb.WorkerState(ready=False)
    agents[0].states = [not_ready, pb.WorkerState(ready=True, draining=True), not_ready]
    assert workers("set-role", "decode", "a")[0] == 0
    assert (agents[0].descriptions, agents[0].states) == ([], [])


def test_the_last_of_its_role_has_no_partner_to_wait_for(agents: tuple[Agent, Agent], workers: Prelude):
    agents[0].states = [pb.WorkerState(engine_state=pb.ENGINE_STATE_STARTING)]
    agents[0].state.ready = False  # not warm with any decode worker: there is none
    assert workers("set-role", "--even-last", "prefill", "a")[0] == 0
    assert agents[0].states == []


def test_a_worker_that_does_not_come_back_is_a_failure(agents: tuple[Agent, Agent], tmp_path: Path, workers: Prelude):
    agents[0].state.ready = False
    config = tmp_path / "cluster.yaml"
    config.write_text(config.read_text() + "engine: {start_timeout_s: 0.5}\n")
    said = "prelude: a: not_ready: it is drained, but after 0.5 s no decode worker"
    workers.refuses("set-role", "decode", "a", says=said)


def test_roles_are_set_one_after_another(agents: tuple[Agent, Agent], workers: Prelude):
    a, b = agents
    a.may_change = threading.Event()

    def let_go_on() -> None:
        wait_until(lambda: a.role_requests)
        time.sleep(0.3)  # in which the other one would be asked
        seen.extend(b.role_requests)
        a.may_change.set()

    seen: list[pb.ChangeRoleRequest] = []
    thread = threading.Thread(target=let_go_on)
    thread.start()
    assert workers("set-role", "--even-last", "decode", "a", "b")[0] == 0
    thread.join()
    assert (seen, [each.even_last for each in (*a.role_requests, *b.role_requests)]) == ([], [True, True])


def test_requests_still_in_flight_are_a_failure(agents: tuple[Agent, Agent], workers: Prelude):
    agents[1].state.load.running_requests = 1
    said = "prelude: b: not_idle: it has requests in flight after 7 s; it takes no new ones until"
    found = json.loads(workers.refuses("drain", "a", "b", "--json", says=said))["workers"]
    assert (found["a"], found["b"]["error"]["code"]) == ({"state": "drained"}, "not_idle")


def test_changes_are_in_the_audit_log(agents: tuple[Agent, Agent], workers: Prelude, prelude: Prelude):
    agents[1].state.load.running_requests = 1
    assert workers("drain", "a", "b")[0] == 1
    workers("undrain", "a")
    workers("list")
    assert audited(prelude) == [
        ("worker.drain", "a", "done"),
        ("worker.drain", "b", "not_idle"),
        ("worker.undrain", "a", "done"),
    ]


def test_a_drain_is_made_although_the_audit_log_cannot_be_written(agents: tuple[Agent, Agent], workers: Prelude):
    with Path("cluster.yaml").open("a") as file:
        file.write("catalog: {url: 'sqlite:////dev/null/catalog.db'}\n")
    output = workers.refuses("drain", "a", says="catalog")
    assert (output, agents[0].state.draining) == ("a is drained\n", True)


def test_a_stopping_worker_refuses(agents: tuple[Agent, Agent], workers: Prelude):
    agents[1].is_stopping = True
    output = workers.refuses("undrain", "a", "b", says="prelude: b: failed_precondition: worker b is stopping")
    assert output == "a takes requests, as before\n"


def test_list(agents: tuple[Agent, Agent], workers: Prelude):
    a, b = agents
    a.state.load.used_kv_tokens = 40
    a.state.not_warm_with.extend(["d1", "d2"])
    b.state.ready, b.state.engine_state, b.state.reason = False, pb.ENGINE_STATE_STARTING, "the engine is starting"
    output = workers.prints("list")
    ports = [worker.control_port for worker in load_cluster_config(Path("cluster.yaml")).workers.values()]
    assert output.splitlines() == [
        "a  unified  ready (not warm with d1, d2)  0 running, 0 queued, 40 of 100 KV tokens  "
        f"agent 127.0.0.1:{ports[0]}, metrics 127.0.0.1:9101",
        "b  unified  starting (the engine is starting)  0 running, 0 queued, 0 of 100 KV tokens  "
        f"agent 127.0.0.1:{ports[1]}",
    ]
    a.state.draining = b.state.draining = True
    a.state.load.queued_requests = 1
    listed = workers.json("list")["workers"]
    assert {name: worker["state"] for name, worker in listed.items()} == {"a": "draining", "b": "drained"}
    b.is_stopping = True
    output = workers.refuses("list", says="prelude: b: unavailable: its agent is stopping")
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["drain", "c"], "there is no worker called 'c'; there is a, b"),
        (["drain", "a", "--deadline", "nan"], "is no number from 0 on"),
        (["drain"], "NAME"),
    ],
)
def test_wrong_usage(agents: tuple[Agent, Agent], workers: Prelude, words: list[str], says: str):
    workers.refuses(*words, says=says, status=2)


def test_an_agent_that_is_gone_is_named(agents: tuple[Agent, Agent], workers: Prelude, tmp_path: Path):
    text = (tmp_path / "cluster.yaml").read_text()
    (tmp_path / "cluster.yaml").write_text(text + "  c: {role: unified, control_port: 1}\n")
    output = workers.refuses("list", says="prelude: c: unavailable:")
    assert len(output.splitlines()) == 2


def test_chosen_ports_come_from_the_running_cluster(agents: tuple[Agent, Agent], workers: Prelude, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    running = load_cluster_config(path)
    path.write_text("model: {path: ., name: demo}\nworkers:\n  a: {role: unified}\n  b: {role: unified}\n")
    workers.refuses("drain", "a", says="workers.a.control_port is 0, and no `prelude up` runs this file", status=2)
    with recorded(running, record_of(path)):
        assert workers("drain", "a")[:2] == (0, "a is drained\n")
        record_of(path).write_text("half")
        assert workers("drain", "a")[0] == 2
    assert record_of(path).exists()  # another cluster's by now
    record_of(path).unlink()
    with recorded(running, record_of(path)):
        assert record_of(path).exists()
    assert not record_of(path).exists()


@pytest.fixture
def found() -> Agent:
    return Agent("found-1")


@pytest.fixture
def dns_port(found: Agent) -> Iterator[int]:
    """A DNS server that has the addresses of two agents."""
    with (
        served(found, f"127.0.0.2:{FOUND_PORT}"),
        served(Agent("a"), f"127.0.0.3:{FOUND_PORT}"),
        in_thread(dns_server()) as server,
    ):
        server.set_addresses("u.example.org", ["127.0.0.2", "127.0.0.3"])
        yield server.port


@pytest.mark.slow
def test_workers_that_sources_find(agents: tuple[Agent, Agent], dns_port: int, workers: Prelude, tmp_path: Path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        path.read_text() + "discovery:\n"
        f"  unified: {{dns: u.example.org, control_port: {FOUND_PORT}, worker: {{drain_timeout_s: 11}}}}\n"
        f"  nameservers: ['127.0.0.1:{dns_port}']\n"
    )
    said = "not_usable: its name is 'a', which is that of another worker, in cluster.yaml"
    output = workers.refuses("list", says=said)
    assert [line.split()[:3] for line in output.splitlines()] == [
        ["a", "unified", "ready"],
        ["b", "unified", "ready"],
        ["found-1", "unified", "ready"],
    ]
    assert workers("drain", "found-1", "a") == (0, "a is drained\nfound-1 is drained\n", "")
    said = "there is no worker called 'found-2'; there is a, b, found-1"
    assert workers.refuses("drain", "found-2", says=said, status=2) == ""
    path.write_text(path.read_text().replace(str(dns_port), "9"))
    said = "prelude: DNS name u.example.org: not_usable: DNS name u.example.org cannot be looked up"
    assert len(workers.refuses("list", says=said).splitlines()) == 2


@pytest.mark.slow
def test_a_worker_that_a_source_finds_in_one_role_gets_the_other(
    agents: tuple[Agent, Agent], found: Agent, dns_port: int, workers: Prelude, tmp_path: Path
):
    path, found.role = tmp_path / "cluster.yaml", pb.ROLE_DECODE
    path.write_text(
        path.read_text() + "role_changes: manual\ndiscovery:\n"
        f"  decode: {{dns: u.example.org, control_port: {FOUND_PORT}}}\n"
        f"  prefill: {{dns: p.example.org, control_port: {FOUND_PORT}}}\n"
        f"  nameservers: ['127.0.0.1:{dns_port}']\n"
    )
    assert workers("set-role", "prefill", "found-1")[0] == 0
    assert "found-1  prefill  ready" in workers("list")[1]
    config = load_cluster_config(path)
    assert "found-1" in agents_of(config, path, None, holds_adapters=True).addresses
    path.write_text(path.read_text().replace("role_changes: manual", "role_changes: dry-run"))
    assert "its role is prefill, where decode workers are looked for" in workers("list")[2]
