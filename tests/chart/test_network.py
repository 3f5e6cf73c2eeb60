"""NetworkPolicies allow what processes do, as the code says who calls whom, and nothing else."""

import inspect
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

import pytest
import zmq
from support.chart.helm_chart import (
    SCENARIOS,
    Object,
    changed,
    needs_helm,
    of_kind,
    pods,
    rendered,
    scenario_values,
    selects,
)

from cluster.control.authorization import CALLERS, ENGINE_KEY_READERS

pytestmark = needs_helm
WORKERS = ("prefill", "decode", "unified")
PEERS = {"prefill": "decode", "decode": "prefill"}
ELSEWHERE = {"kubernetes.io/metadata.name": "elsewhere"}
ISSUERS = {"login.example.org": "10.30.0.10"}  # where those of the scenarios are
EPHEMERAL = (32768, 60999)  # first and last port that a kernel chooses, unless net.ipv4.ip_local_port_range is set
API_SERVER = "10.30.0.40"
NODE = "10.40.1.7"  # of the pools with hostNetwork
Labels = dict[str, str] | str  # of a pod of this release, or an address of something else


def matches(peers: list[dict[str, Any]] | None, who: Labels, namespace: dict[str, str] | None) -> bool:
    """Whether one of the peers of a rule is `who`; `namespace`: the labels of another namespace, if it is there."""
    if not peers:
        return True
    for peer in peers:
        if "ipBlock" in peer:
            if isinstance(who, str) and ip_address(who) in ip_network(peer["ipBlock"]["cidr"]):
                return True
            continue
        if isinstance(who, str):
            continue
        if "namespaceSelector" in peer:
            if not selects(peer["namespaceSelector"], namespace or {}):
                continue
        elif namespace is not None:
            continue
        if selects(peer.get("podSelector", {}), who):
            return True
    return False


def permits(rule: dict[str, Any], side: str, who: Labels, namespace: dict[str, str] | None, port: int) -> bool:
    ports = rule.get("ports")
    is_port = not ports or any(
        each["port"] <= port <= each.get("endPort", each["port"]) and each["protocol"] == "TCP" for each in ports
    )
    return is_port and matches(rule.get(side), who, namespace)


class Network:
    """What the policies of one scenario allow. Pods are known by their component."""

    def __init__(self, scenario: str) -> None:
        objects: list[Object] = rendered(scenario)
        self.policies = [each["spec"] for each in of_kind(objects, "NetworkPolicy")]
        self.labels = {labels["app.kubernetes.io/component"]: labels for _, _, labels in pods(objects)}
        self.roles = [role for role in WORKERS if role in self.labels]
        self.ports: dict[str, dict[str, int]] = {}
        for _, spec, labels in pods(objects):
            for each in spec["containers"]:
                ports = {port["name"]: port["containerPort"] for port in each.get("ports", ())}
                self.ports.setdefault(labels["app.kubernetes.io/component"], {}).update(ports)
        self.values = scenario_values(scenario)
        self.switches = self.values["cluster"].get("role_changes") in ("manual", "auto")

    def peers(self, role: str) -> tuple[str, ...]:
        """The roles of the pools whose workers may be the other ends of KV transfers."""
        if role not in PEERS:
            return ()
        return tuple(PEERS) if self.switches else (PEERS[role],)

    def _side(
        self, direction: str, side: str, pod: str, who: Labels, elsewhere: dict[str, str] | None, port: int
    ) -> bool:
        applying = [
            each
            for each in self.policies
            if selects(each["podSelector"], self.labels[pod]) and direction.capitalize() in each["policyTypes"]
        ]
        assert applying, f"no policy is for {pod}"  # which would allow everything
        return any(permits(rule, side, who, elsewhere, port) for each in applying for rule in each.get(direction, ()))

    def allows(self, source: str, destination: str, port: int) -> bool:
        """Between two pods of the release."""
        return self._side("egress", "to", source, self.labels[destination], None, port) and self._side(
            "ingress", "from", destination, self.labels[source], None, port
        )

    def lets_out(self, source: str, address: str, port: int) -> bool:
        return self._side("egress", "to", source, address, None, port)

    def lets_in_from(self, destination: str, address: str, port: int) -> bool:
        return self._side("ingress", "from", destination, address, None, port)

    def lets_in(self, destination: str, port: int, namespace: dict[str, str] = ELSEWHERE) -> bool:
        """A pod of another namespace."""
        return self._side("ingress", "from", destination, {"app": "any"}, namespace, port)


def component_of(role: str) -> str:
    return "toolbox" if role == "operator" else role


def expected_flows(network: Network) -> set[tuple[str, str, str]]:
    """Source, destination and name of the port, by what the code says."""
    flows = set()
    callers = set().union(*CALLERS.values())
    for role in network.roles:
        peers = network.peers(role)
        for caller in callers:
            if caller not in PEERS or caller in peers:
                flows.add((component_of(caller), role, "control"))
        for reader in ENGINE_KEY_READERS | set(peers if network.switches else ()):
            if reader not in PEERS or reader in peers:
                flows.add((reader, role, "engine"))
        if role == "prefill" or (role == "decode" and network.switches):
            flows |= {(peer, role, "bootstrap") for peer in peers}
    flows |= {("test", "router", "http"), ("trainer", "router", "http")}
    flows |= {(caller, "trainer", "http") for caller in ("router", "toolbox")}
    return {flow for flow in flows if {*flow[:2]} <= network.labels.keys()}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_flows_are_those_of_the_code(scenario: str):
    network = Network(scenario)
    allowed = {
        (source, destination, name)
        for source in network.labels
        for destination, ports in network.ports.items()
        for name, port in ports.items()
        if network.allows(source, destination, port)
    }
    everybody_reaches = {  # unless `networkPolicy.clients` says who the clients are
        (source, "router", "http")
        for source in network.labels
        if network.lets_in("router", network.ports["router"]["http"]) and network.lets_out(source, "10.0.0.1", 8000)
    }
    assert allowed - everybody_reaches == expected_flows(network) - everybody_reaches


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kv_ports_are_those_that_are_chosen_at_start(scenario: str):
    """ZeroMQ's by itself, UCX's by the kernel."""
    network = Network(scenario)
    if "prefill" not in network.roles:
        return
    defaults = inspect.signature(zmq.Socket.bind_to_random_port).parameters
    chosen = (defaults["min_port"].default, defaults["max_port"].default - 1, *EPHEMERAL)
    for port in chosen:
        assert network.allows("prefill", "decode", port)
        assert network.allows("decode", "prefill", port)
        assert not network.allows("router", "decode", port)
        assert network.allows("decode", "decode", port) == network.switches


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_pods_of_the_hosts_network_are_known_by_their_nodes(scenario: str):
    """No selector matches them, and no policy is for them."""
    network = Network(scenario)
    on_nodes = {
        labels["app.kubernetes.io/component"] for _, spec, labels in pods(rendered(scenario)) if spec.get("hostNetwork")
    }
    first, node = EPHEMERAL[0], NODE
    for role in network.roles:
        ports, peer = network.ports[role], PEERS.get(role)
        for caller, called in (("router", ("control", "engine")), ("toolbox", ("control",)), (peer, ("control",))):
            for name in called:
                if caller in network.labels:
                    assert network.lets_out(caller, node, ports[name]) == (role in on_nodes), (caller, role, name)
        if peer:
            assert network.lets_out(peer, node, first) == (role in on_nodes)
            assert network.lets_in_from(peer, node, first) == (role in on_nodes)
            assert network.lets_in_from(peer, node, network.ports[peer]["control"]) == (role in on_nodes)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_reaches_the_outside(scenario: str):
    network = Network(scenario)
    policy = network.values.get("networkPolicy", {})
    is_s3 = network.values["store"]["url"].startswith("s3:")
    database, store = (
        (
            each.get("to", [{}])[0].get("ipBlock", {}).get("cidr", "192.0.2.1/32").split("/")[0],
            each.get("port", default),
        )
        for each, default in ((policy.get("catalog", {}), 5432), (policy.get("store", {}), 443))
    )
    has_database = "existingSecret" in network.values["catalog"]
    for component in network.labels:
        reads_catalog = component in ("router", "toolbox", "migrate") and has_database
        readers = {"router", "toolbox", "prefill", "unified"} | ({"decode"} if network.switches else set())
        reads_store = component in readers and is_s3
        assert network.lets_out(component, *database) == reads_catalog, component
        assert network.lets_out(component, *store) == reads_store, component
        assert not network.lets_out(component, "192.0.2.1", 80), component
        assert not network.lets_out(component, API_SERVER, 6443), component


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_routers_reach_the_issuers_whose_keys_they_fetch(scenario: str):
    network = Network(scenario)
    auth = network.values["cluster"]["router"].get("auth") or {}
    for issuer in auth.get("oidc", ()):
        host = urlsplit(issuer["issuer"]).hostname
        assert host in ISSUERS, f"{host}: give its address here"
        assert network.lets_out("router", ISSUERS[host], urlsplit(issuer["issuer"]).port or 443)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_the_outside_reaches(scenario: str):
    network = Network(scenario)
    policy = network.values.get("networkPolicy", {})
    is_open = not policy.get("clients")
    for component, ports in network.ports.items():
        for name, port in ports.items():
            is_clients = (component, name) == ("router", "http")
            assert network.lets_in(component, port) == (is_clients and is_open), (component, name)
    if policy.get("clients"):
        ports = network.ports
        gateways, observers = ({"kubernetes.io/metadata.name": each} for each in ("gateways", "observability"))
        assert network.lets_in("router", ports["router"]["http"], gateways)
        assert not network.lets_in("router", ports["router"]["admin"], gateways)
        assert network.lets_in("decode", ports["decode"]["metrics"], observers)
        assert not network.lets_in("decode", ports["decode"]["control"], observers)


def test_the_trainer_is_a_client_of_the_router():
    """Also where clients are named. Its metrics are open to who is named, as those of others."""
    named = {"clients": [{"podSelector": {"matchLabels": {"app": "web"}}}]}
    network = Network("trainer")
    network.policies = [each["spec"] for each in of_kind(changed("trainer", {"networkPolicy": named}), "NetworkPolicy")]
    ports = network.ports
    assert network.allows("trainer", "router", ports["router"]["http"])
    assert not network.allows("unified", "router", ports["router"]["http"])
    assert network.lets_in("trainer", ports["trainer"]["metrics"], {"kubernetes.io/metadata.name": "monitoring"})


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nobody_reaches_metrics_or_the_admin_listener_unless_named(scenario: str):
    """The admin listener asks for no key and shows all tenants' adapters."""
    monitors = {"podMonitor": {"enabled": False}}
    nobody = changed(scenario, {"networkPolicy": {"monitoring": []}, "monitoring": monitors})
    closed = [each["spec"] for each in of_kind(nobody, "NetworkPolicy")]
    named = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    opened = [
        each["spec"] for each in of_kind(changed(scenario, {"networkPolicy": {"monitoring": named}}), "NetworkPolicy")
    ]
    router, elsewhere = Network(scenario).labels["router"], {"app": "web"}
    admin = Network(scenario).ports["router"]["admin"]
    for policies, who, expected in (
        (closed, elsewhere, False),
        (closed, {"app": "prometheus"}, False),
        (opened, elsewhere, False),
        (opened, {"app": "prometheus"}, True),
    ):
        rules = [rule for spec in policies if selects(spec["podSelector"], router) for rule in spec.get("ingress", ())]
        assert any(permits(rule, "from", who, None, admin) for rule in rules) == expected
