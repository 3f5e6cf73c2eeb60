"""Prefill and decode on two hosts (network namespaces), KV over TCP: right answers, also over a slow link.

While the link is cut, requests end with an error in time, and afterwards they are answered again.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from support.clusters.running_cluster import START_TIMEOUT_S, RunningCluster
from support.engines.parity import Case, completion_body, reference_cases
from support.logged_process import logged_process

from cluster.config.load import load_cluster_config
from process.free_ports import free_port

pytestmark = pytest.mark.long

NAMES = ("a0", "a3", "reft", None)
NEW_TOKENS = 8
PROMPT_TOKENS = 300
DEADLINE_S = 120.0  # of a client: whatever ends later hangs
CUT_S = 45.0  # UCX probes a silent peer after 10 s, every 2 s, and gives it up
RECOVERY_S = 120.0
_PORTS = {"control_port": 7001, "metrics_port": 7002, "engine_port": 7003}  # each host has its own

HOSTS = ("prefill", "decode")
LINK = "kv0"
_NET = "198.18"  # of RFC 2544: for benchmarks, routed nowhere


@dataclass(frozen=True)
class TwoHosts:
    """Network namespaces with a link between them, and one from each to this namespace.

        here --up0-- prefill --kv0-- decode --up0-- here

    Engines are reached from here at the addresses that they have on `kv0`, so nothing but what the two tell each other
    passes over it.
    """

    namespaces: dict[str, str]  # by host
    addresses: dict[str, str]  # on the link between the two

    def command(self, host: str, words: list[str]) -> list[str]:
        """A command line that runs on the host."""
        return ["ip", "netns", "exec", self.namespaces[host], *words]

    def sent_bytes(self, host: str) -> int:
        """Over the link, since it is there."""
        path = f"/sys/class/net/{LINK}/statistics/tx_bytes"
        return int(subprocess.run(self.command(host, ["cat", path]), check=True, capture_output=True).stdout)

    def limit(self, rate: str) -> None:
        """Both directions of the link carry so much, as `tc` writes it: 50mbit."""
        self._shape("rate", rate, "burst", "256kb", "latency", "200ms")

    def cut(self) -> None:
        """The link loses every packet, silently: none is as small as the bucket of a byte."""
        self._shape("rate", "8bit", "burst", "1", "limit", "1")

    def mend(self) -> None:
        """The link carries everything."""
        for namespace in self.namespaces.values():
            _run("tc", "-n", namespace, "qdisc", "del", "dev", LINK, "root", check=False)

    def _shape(self, *words: str) -> None:
        for namespace in self.namespaces.values():
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", LINK, "root", "tbf", *words)


def why_not() -> str | None:
    """Why this machine cannot have two hosts; None: it can."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} of iproute2 is not installed"
    probe = f"prelude-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "name", LINK, "type", "veth", "peer", "name", "up0")
        TwoHosts({"probe": probe}, {}).limit("1mbit")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", probe, check=False)
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Both are gone afterwards, with everything in them."""
    namespaces = {host: f"prelude-{host}-{os.getpid()}" for host in HOSTS}
    addresses = {host: f"{_NET}.2.{number + 1}" for number, host in enumerate(HOSTS)}
    try:
        for number, (host, namespace) in enumerate(namespaces.items()):
            up = f"pre{host[0]}{os.getpid()}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "link", "add", up, "type", "veth", "peer", "name", "up0", "netns", namespace)
            _run("ip", "addr", "add", f"{_NET}.{number}.1/30", "dev", up)
            _run("ip", "link", "set", up, "up")
            _run("ip", "-n", namespace, "addr", "add", f"{_NET}.{number}.2/30", "dev", "up0")
            _run("ip", "-n", namespace, "link", "set", "up0", "up")
            _run("ip", "route", "add", f"{addresses[host]}/32", "via", f"{_NET}.{number}.2")
        first, second = namespaces.values()
        _run("ip", "-n", first, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", second)
        for host, namespace in namespaces.items():
            _run("ip", "-n", namespace, "addr", "add", f"{addresses[host]}/30", "dev", LINK)
            _run("ip", "-n", namespace, "link", "set", LINK, "up")
        yield TwoHosts(namespaces, addresses)
    finally:
        for namespace in namespaces.values():
            _run("ip", "netns", "del", namespace, check=False)  # its ends of the links, and so the others


def _run(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, capture_output=True, text=True, timeout=30, cwd=Path("/"))


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if (reason := why_not()) is not None:
        pytest.skip(f"no two hosts here: {reason}")
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: TwoHosts, tmp_path_factory, model_dir: Path, adapters: dict[str, Path]) -> Iterator[RunningCluster]:
    root = tmp_path_factory.mktemp("two-hosts")
    served = {name: adapters[name] for name in NAMES if name}
    data = {
        "model": {"path": str(model_dir), "name": "demo", "dtype": "float32"},
        "engine": {"device": "cpu", "max_total_tokens": 16384, "chunked_prefill_tokens": 128},
        "router": {"port": free_port(), "admin": {"port": free_port()}, "insecure": True},
        "workers": {
            f"{host}-0": {"role": host, "host": hosts.addresses[host], **_PORTS}
            | ({"bootstrap_port": 7004} if host == "prefill" else {})
            for host in HOSTS
        },
        "adapters": {name: {"path": str(path)} for name, path in served.items()},
    }
    path = root / "cluster.yaml"
    path.write_text(yaml.safe_dump(data))
    config = load_cluster_config(path)
    # Nothing but TCP over the link: the two hosts share memory, which UCX would prefer.
    over_tcp = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": LINK, "PRELUDE_DIE_WITH_PARENT": "1"}
    with contextlib.ExitStack() as stack:

        def start(name: str, words: list[str], env: dict[str, str]) -> None:
            stack.enter_context(logged_process(words, root / f"{name}.log", env=env, start_new_session=True))

        for host in HOSTS:
            own = [sys.executable, "-m", "cli.main", f"{host}-worker", "--name", f"{host}-0", "--config", str(path)]
            start(host, hosts.command(host, [*own, "--scratch", str(root / f"scratch-{host}")]), over_tcp)
        own = [sys.executable, "-m", "cli.main", "router", "--config", str(path)]
        start("router", own, {**os.environ, "PRELUDE_DIE_WITH_PARENT": "1"})
        running = RunningCluster(
            url=f"http://127.0.0.1:{data['router']['port']}",
            model_dir=model_dir,
            adapters=served,
            logs=root,
            config=config,
            supervisor=psutil.Process(),
        )
        running.wait_ready(START_TIMEOUT_S)
        yield running


def prompt(number: int) -> tuple[int, ...]:
    return tuple(20 + (7 * place + 31 * number) % 400 for place in range(PROMPT_TOKENS))


@pytest.fixture(scope="module")
def right(cluster: RunningCluster, tmp_path_factory) -> list[Case]:
    """Two prompts under each adapter, with the reference's answers, all different."""
    asked = itertools.product(NAMES, map(prompt, (0, 2)))
    folder = tmp_path_factory.mktemp("reference")
    cases = reference_cases(cluster.model_dir, folder, cluster.adapters, asked, NEW_TOKENS)
    assert len({tuple(case.reference["tokens"]) for case in cases}) == len(cases)
    return cases


def outcome(cluster: RunningCluster, case: Case) -> str:
    """How a request ended; an answer is held against the reference."""
    body = completion_body(case.adapter, case.prompt_ids, max_tokens=NEW_TOKENS)
    try:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=DEADLINE_S)
    except httpx.TimeoutException:
        return "hung"
    except httpx.HTTPError:
        return "broken"
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.json()['error']['code']}"
    tokens, wanted = answer.json()["choices"][0]["token_ids"], case.reference["tokens"]
    return "right" if tokens == wanted else f"wrong: {tokens}, not {wanted}"


def outcomes(cluster: RunningCluster, right: list[Case], at_once: int) -> Counter[str]:
    with ThreadPoolExecutor(at_once) as threads:
        cases = itertools.islice(itertools.cycle(right), at_once)
        return Counter(threads.map(lambda case: outcome(cluster, case), cases))


def test_kv_goes_over_the_link_and_answers_are_right(hosts: TwoHosts, cluster: RunningCluster, right):
    config = json.loads((cluster.model_dir / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_bytes = PROMPT_TOKENS * config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 4
    before = hosts.sent_bytes("prefill")
    assert outcomes(cluster, right, 1) == {"right": 1}
    assert hosts.sent_bytes("prefill") - before > kv_bytes
    assert outcomes(cluster, right, 16) == {"right": 16}


def test_answers_over_a_slow_link_are_right(hosts: TwoHosts, cluster: RunningCluster, right):
    hosts.limit("50mbit")
    try:
        assert outcomes(cluster, right, 16) == {"right": 16}
    finally:
        hosts.mend()


def test_a_cut_link_gives_errors_in_time_and_recovers(hosts: TwoHosts, cluster: RunningCluster, right):
    hosts.cut()
    try:
        found = outcomes(cluster, right, 8)
    finally:
        hosts.mend()
    print(f"while the link was cut: {dict(found)}")
    assert not {each for each in found if each == "hung" or each.startswith("wrong")}
    await_right_answers(cluster, right)


def test_a_cut_that_ends_the_kv_connection_is_recovered_from(hosts: TwoHosts, cluster: RunningCluster, right):
    """TCP's keepalive gives the idle connection up, and NIXL takes no transfer over it any longer."""
    hosts.cut()
    try:
        time.sleep(CUT_S)
    finally:
        hosts.mend()
    await_right_answers(cluster, right)
    log = (cluster.logs / "prefill.log").read_text()
    assert re.search(r"NIXL invalidated remote agent \S+; reloading its metadata", log), "it has outlived the cut"


def await_right_answers(cluster: RunningCluster, right: list[Case]) -> None:
    """Wait until requests are answered again and nothing is left at the engines; none may hang or be wrong."""
    deadline = time.monotonic() + RECOVERY_S
    seen: Counter[str] = Counter()
    while (last := outcomes(cluster, right, 4)) != {"right": 4}:
        seen += last
        assert time.monotonic() < deadline, f"the link works again, and requests end as {dict(seen)}"
    print(f"until it worked again: {dict(seen)}")
    assert not {each for each in seen if each == "hung" or each.startswith("wrong")}
    assert outcomes(cluster, right, 16) == {"right": 16}
    cluster.wait_idle(60)
